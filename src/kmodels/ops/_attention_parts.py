"""Attention of some queries to some keys: who sees whom, and the products."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from kmodels.core.types import Tensor
from kmodels.ops._wide import wide

# Far below any score, yet finite: softmax over -inf alone is NaN, and so is its gradient.
MASKED = -1e30


class Hidden(NamedTuple):
    """The mask and the rules that hide keys from queries, as in `kmodels.ops.attention`."""

    mask: Tensor | None
    segment_ids: Tensor | None
    block_ids: Tensor | None
    causal: bool
    window: int | None


def products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    may_be_empty: bool,
    scale: float | None,
    soft_cap: float | None,
    drop: Callable[[Tensor], Any],
) -> Any:
    """Returns softmax(query @ key.T) @ value.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, H).
        allowed: bool, broadcastable to (B, N, T, S) with four axes; `None` for all.
        may_be_empty: whether a query may see nothing; it gets zeros.
        scale: multiplies the scores; `None` for 1 / sqrt(H).
        soft_cap: as in `kmodels.ops.attention`.
        drop: takes the weights, (B, N, T, S) or (B, K, N // K, T, S), and returns what is left.
    """
    heads, groups, head_dim = query.shape[2], key.shape[2], query.shape[3]
    batch, length = ops.shape(query)[0], ops.shape(query)[1]
    grouped = heads != groups
    if grouped:
        query = ops.reshape(query, (batch, length, groups, heads // groups, head_dim))
    dtype, factor = wide(query), head_dim**-0.5 if scale is None else scale
    narrow = ops.dtype(query) == "float16"
    if narrow:  # whose range products leave before they are scaled
        query = ops.cast(ops.cast(query, dtype) * factor, "float16")
    scores = ops.einsum("btkgh,bskh->bkgts" if grouped else "btkh,bskh->bkts", query, key)
    scores = ops.cast(scores, dtype)
    if not narrow:
        scores = scores * factor
    if soft_cap is not None:
        scores = ops.tanh(scores / soft_cap) * soft_cap
    if allowed is not None:
        if grouped:
            allowed = _group(allowed, groups)
        scores = ops.where(allowed, scores, ops.cast(MASKED, dtype))
    weights = drop(ops.cast(ops.softmax(scores, axis=-1), ops.dtype(value)))
    output = ops.einsum("bkgts,bskh->btkgh" if grouped else "bkts,bskh->btkh", weights, value)
    if may_be_empty and allowed is not None:
        # Only a caller's mask can leave a query nothing to attend to; its weights are uniform.
        some = ops.any(allowed, axis=-1, keepdims=True)
        some = ops.transpose(some, (0, 3, 1, 2, 4) if grouped else (0, 2, 1, 3))
        output = ops.where(some, output, ops.zeros((), dtype=ops.dtype(output)))
    return ops.reshape(output, (batch, length, heads, head_dim)) if grouped else output


def allowed_pairs(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    segment_ids: Tensor | None = None,
    block_ids: Tensor | None = None,
) -> Any:
    """Joins mask, causal flag, window, segments and blocks.

    Returns:
        bool, four axes, broadcastable to (B, N, T, S), or `None` if every query sees every key.
    """
    length, keys = ops.shape(query)[1], ops.shape(key)[1]
    offset = keys - length

    def own(ids: Tensor | None) -> Any:
        return None if ids is None else ops.convert_to_tensor(ids)[:, offset:]

    hidden = Hidden(mask, segment_ids, block_ids, causal, window)
    placed = (offset, length), (0, keys)
    return pairs(hidden, own(segment_ids), own(block_ids), *placed)


def pairs(
    hidden: Hidden,
    segments: Tensor | None,
    blocks: Tensor | None,
    queries: tuple[Any, Any],
    keys: tuple[Any, Any],
) -> Any:
    """Returns which keys some queries see, bool with four axes, or `None` if all see all.

    Args:
        hidden: mask and numbers of these keys.
        segments: (b, t), segments of the queries.
        blocks: (b, t), blocks of the queries.
        queries: position of the first query, and how many there are.
        keys: position of the first key, and how many there are.
    """
    mask, segment_ids, block_ids, causal, window = hidden
    allowed = None
    if mask is not None:
        axes = len(mask.shape)
        mask = ops.cast(mask, "bool")
        allowed = ops.reshape(mask, (1,) * (4 - axes) + tuple(ops.shape(mask)))
    if segment_ids is not None and segments is not None:
        allowed = _both(allowed, _same(segments, segment_ids))
    if not causal and window is None:
        return allowed
    (first, length), (start, held) = queries, keys
    position = ops.expand_dims(ops.arange(length, dtype="int32") + first, 1)
    behind = position - ops.expand_dims(ops.arange(held, dtype="int32") + start, 0)
    behind = ops.reshape(behind, (1, 1, length, held))
    if causal:
        seen = behind >= 0
        if block_ids is not None and blocks is not None:
            inside = ops.expand_dims(ops.expand_dims(ops.greater_equal(block_ids, 0), 1), 1)
            seen = ops.logical_or(seen, _both(_same(blocks, block_ids), inside))
        allowed = _both(allowed, seen)
    if window is not None:
        allowed = _both(allowed, (behind if causal else ops.abs(behind)) < window)
    return allowed


def _both(first: Tensor | None, second: Tensor) -> Any:
    return second if first is None else ops.logical_and(first, second)


def _same(own: Tensor, ids: Tensor) -> Any:
    """(b, t), (b, s) -> (b, 1, t, s): whether query and key have the same number."""
    same = ops.equal(ops.expand_dims(own, 2), ops.expand_dims(ids, 1))
    return ops.expand_dims(same, 1)


def _group(allowed: Tensor, groups: int) -> Tensor:
    """(B, N or 1, T, S) -> (B, K or 1, N // K or 1, T, S)."""
    batch, heads, length, keys = ops.shape(allowed)
    if heads == 1:
        return ops.expand_dims(allowed, 1)
    return ops.reshape(allowed, (batch, groups, heads // groups, length, keys))
