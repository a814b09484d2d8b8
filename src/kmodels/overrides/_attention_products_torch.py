"""Parts of attention by matrix products on torch: layouts of heads, and a masked softmax."""

import torch

from kmodels.ops._attention_blockwise import MASKED
from kmodels.overrides.blocks import near


def joined(blocks_of_part: list[torch.Tensor]) -> torch.Tensor:
    return blocks_of_part[0] if len(blocks_of_part) == 1 else torch.cat(blocks_of_part, 1)


def slices(batch: int, size: int) -> list[slice]:
    """Returns the batch in slices of at least one and at most `size`."""
    size = max(size, 1)
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def as_rows(x: torch.Tensor, shared: int) -> torch.Tensor:
    """(b, T, K * G, H) -> (b * K, T * G, H), a copy: products with strides take longer."""
    batch, length, heads, width = x.shape
    split = x.reshape(batch, length, heads // shared, shared, width)
    return split.permute(0, 2, 1, 3, 4).contiguous().view(-1, length * shared, width)


def as_heads(x: torch.Tensor, groups: int, shared: int) -> torch.Tensor:
    """(b * K, T * G, H) -> (b, T, K * G, H)."""
    split = x.view(-1, groups, x.shape[1] // shared, shared, x.shape[2])
    return split.permute(0, 2, 1, 3, 4).flatten(2, 3)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """(b, S, K, H) -> (b * K, S, H)."""
    return as_rows(x, 1)


def of_part(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """(B or 1, ...) -> (b or 1, ...)."""
    return x if x is None or x.shape[0] == 1 else x[part]


def rows_of(queries: slice, shared: int) -> slice:
    return slice(queries.start * shared, queries.stop * shared)


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale * a @ b, scaled before it is rounded."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def weights_of(
    scores: torch.Tensor,
    hidden: tuple[torch.Tensor | None, torch.Tensor | None],
    near_keys: tuple[slice, slice, int],
    causal: bool,
    window: int | None,
    split: tuple[int, int],
) -> torch.Tensor:
    """Returns attention weights of a block of scores (b * K, t * G, s); the scores are used up.

    `hidden` are the mask (b or 1, N or 1, T or 1, S or 1) and the segments (b or 1, S).
    `near_keys` are the queries, the keys, and how far the last key is ahead of the last query.
    """
    (queries, seen, ahead), (mask, segments) = near_keys, hidden
    groups, shared = split
    heads = scores.view(-1, groups, queries.stop - queries.start, shared, scores.shape[2])
    close = same = None
    if causal or window is not None:
        found = near((queries, seen), ahead, causal, window)
        close = torch.from_numpy(found).to(scores.device)[:, None]
        # The keys before the block's first query need no mask if it is only causal.
        start = 0 if window is not None else queries.start + ahead - seen.start
        heads[..., start:].masked_fill_(~close[..., start:], MASKED)
    if segments is not None:
        own = segments[:, None, queries.start + ahead : queries.stop + ahead, None, None]
        same = own == segments[:, None, None, None, seen]
        heads.masked_fill_(~same, MASKED)
    if mask is None:
        return torch.softmax(scores, -1)
    # (b or 1, N or 1, T or 1, S or 1) -> (b or 1, K or 1, T or 1, G or 1, S or 1)
    split = split if mask.shape[1] > 1 else (1, 1)
    allowed = mask.reshape(mask.shape[0], *split, *mask.shape[2:]).transpose(2, 3)
    allowed = allowed[:, :, queries if allowed.shape[2] > 1 else slice(None)]
    allowed = allowed[..., seen if allowed.shape[4] > 1 else slice(None)]
    heads.masked_fill_(~allowed, MASKED)
    for other in (close, same):
        if other is not None:
            allowed = allowed & other
    weights = torch.softmax(scores, -1)
    # A query that sees nothing has even weights by now; it gets none.
    weights.view_as(heads).mul_(allowed.any(-1, keepdim=True))
    return weights
