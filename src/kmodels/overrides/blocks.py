"""Blocks of queries and the keys that each can see, for attention that goes block by block."""

import numpy as np

from kmodels.ops._attention_blockwise import cuts

Block = tuple[slice, slice]


def blocks(
    length: int, keys: int, causal: bool, window: int | None, size: int, always: bool = False
) -> list[Block]:
    """Cuts the queries so that keys no query of a block can see are left out.

    Args:
        length: queries T.
        keys: keys S.
        causal: as in `ops.attention`.
        window: as in `ops.attention`.
        size: queries of a block, where cutting pays at all.
        always: cut also where all see all.

    Returns:
        (queries, keys) of each block, in order.
    """
    if not causal and window is None and not always:
        return [(slice(0, length), slice(0, keys))]
    return [
        (slice(x.start, x.start + x.size), slice(x.low, x.low + x.width))
        for x in cuts(length, keys, not causal, causal, window, size)
    ]


def near(block: Block, offset: int, causal: bool, window: int | None) -> np.ndarray:
    """Returns which keys of a block lie where its queries may look.

    Args:
        block: queries and keys.
        offset: keys before the first query, S - T.
        causal: as in `ops.attention`.
        window: as in `ops.attention`.

    Returns:
        (t, s) bool.
    """
    queries, seen = block
    place = np.arange(queries.start, queries.stop)[:, None] + offset
    behind = place - np.arange(seen.start, seen.stop)
    found = behind >= 0 if causal else np.full(behind.shape, True)
    if window is not None:
        found &= (behind if causal else np.abs(behind)) < window
    return found
