"""The blocks that long attention goes through, and the loops that they share."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Blocks share a loop if the widest sees at most this many times the keys of the narrowest.
SPREAD = 1.25


class Block(NamedTuple):
    """Some queries, and the keys that they may see."""

    start: int  # first query
    low: int  # first key
    size: int  # queries
    width: int  # keys


class Loop(NamedTuple):
    """Blocks of one size that a loop goes through, and the keys that each of them is given."""

    places: list[tuple[int, int]]  # first query and first key of each block
    size: int  # queries of a block
    width: int  # keys of a block


def cuts(
    length: int, keys: int, ahead: bool, causal: bool, window: int | None, size: int
) -> list[Block]:
    """Returns blocks of queries, without the keys that no query of a block may see.

    Args:
        length: queries T.
        keys: keys S.
        ahead: whether a query may see keys behind which it stands, S - T places on.
        causal: as in `kmodels.ops.attention`.
        window: as in `kmodels.ops.attention`.
        size: queries of a block.
    """
    found = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first, last = start + keys - length, stop - 1 + keys - length
        low = 0 if window is None else max(first - window + 1, 0)
        high = keys if ahead else last + 1
        if window is not None and not causal:
            high = min(last + window, keys)
        found.append(Block(start, low, stop - start, high - low))
    return found


def loops(blocks: Sequence[Block]) -> list[Loop]:
    """Returns loops over blocks of one size and nearly one width, in order."""
    groups = [[blocks[0]]]
    for before, block in pairwise(blocks):
        widths = [x.width for x in (*groups[-1], block)]
        if block.size == before.size and max(widths) <= SPREAD * min(widths):
            groups[-1].append(block)
        else:
            groups.append([block])
    found = []
    for group in groups:
        width = max(block.width for block in group)
        # The last key stays; more in front, which the rules hide, make widths equal.
        places = [(x.start, max(x.low + x.width - width, 0)) for x in group]
        found.append(Loop(places, group[0].size, width))
    return found
