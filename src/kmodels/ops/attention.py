"""Scaled dot product attention.

Long texts are computed a block of queries at a time. A block holds the scores of its queries with
all keys that they may see, so its softmax is complete. The backward pass recomputes each block from
the inputs: no array has the size of queries times keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops._recompute import Block, recompute
from kmodels.ops._wide import wide
from kmodels.ops.dropout import dropout as dropout_op


@op
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: Tensor | None = None,
    block_ids: Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> Tensor:
    """Scaled dot product attention with grouped key/value heads.

    Shapes: query (B, T, N, H), key (B, S, K, H), value (B, S, K, H) -> (B, T, N, H). N is a
        multiple of K; query head n reads key/value head n // (N // K).
    Dtypes: floating, all equal; scores and softmax in float32 (float64 for float64 input); the
        output has the query's dtype.

    Args:
        query: the query, not scaled.
        key: the key.
        value: the value.
        mask: bool, broadcastable to (B, N, T, S), `True` if a query may attend. A query that may
            attend to no key gets zeros, and zero gradients.
        causal: query i sees keys up to i + S - T, so that the last query sees all.
        window: with `causal`, query i at position p = i + S - T sees keys in (p - window, p];
            without, keys j with |p - j| < window.
        segment_ids: (B or 1, S) int; a query sees keys of its own segment only. The queries are the
            last T of the S positions. Padding is a segment of its own.
        block_ids: (B or 1, S) int, negative for none; with `causal`, tokens of one block also see
            later tokens of it, such as the patches of an image inside a text. Windows, segments
            and the mask apply as well.
        scale: multiplies the scores; `None` for 1 / sqrt(H).
        soft_cap: squashes scaled scores to `soft_cap * tanh(scores / soft_cap)` before masking.
        dropout: share of attention weights set to zero; only if `seed` is given.
        seed: `keras.random.SeedGenerator`, or `None` outside training.

    Raises:
        InputError: if shapes do not fit, the window, the soft cap or the dropout is out of range,
            or there are blocks without `causal`.

    Parity: Transformers' `eager_attention_forward`, `jax.nn.dot_product_attention`,
        `torch.nn.functional.scaled_dot_product_attention` (whose causal mask is aligned to the
        start).
    Source: https://arxiv.org/abs/1706.03762, https://arxiv.org/abs/2305.13245 (grouped heads),
        https://arxiv.org/abs/2107.02027 (segments of packed rows)
    """
    hidden = Hidden(mask, segment_ids, block_ids, causal, window)
    check_attention(query, key, value, hidden, soft_cap, dropout)
    if pays_blockwise(query, key, mask):
        drawn = words(seed) if dropout and seed is not None else None
        return _blockwise(query, key, value, hidden, drawn, scale, soft_cap, dropout)
    allowed = allowed_pairs(query, key, hidden)

    def drop(weights: Tensor) -> Any:
        return dropout_op(weights, dropout, seed) if dropout and seed is not None else weights

    return products(query, key, value, allowed, mask is not None, scale, soft_cap, drop)


class Hidden(NamedTuple):
    """The mask and the rules that hide keys from queries, as in `kmodels.ops.attention`."""

    mask: Tensor | None = None
    segment_ids: Tensor | None = None
    block_ids: Tensor | None = None
    causal: bool = False
    window: int | None = None


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Hidden,
    soft_cap: float | None,
    dropout: float,
) -> None:
    """Raises `InputError` for wrong arguments of `attention`, as far as static shapes are known."""
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    _, segment_ids, block_ids, causal, window = hidden

    def shapes() -> str:
        return f"query {tuple(of_query)}, key {tuple(of_key)}, value {tuple(of_value)}"

    if len(of_query) != 4 or len(of_key) != 4 or len(of_value) != 4:
        raise InputError(
            f"attention takes (batch, length, heads, head_dim) three times, got {shapes()}."
        )
    (_, length, heads, width), (_, keys, groups, of_each) = of_query, of_key
    if heads % groups or groups != of_value[2]:
        raise InputError(
            f"attention got {shapes()}; key and value need equally many heads, "
            "and the query a multiple."
        )
    if width != of_each:
        raise InputError(f"attention got {shapes()}; query and key need the same head_dim.")
    if causal and length is not None and keys is not None and length > keys:
        raise InputError(
            f"attention with causal=True got {shapes()}; it needs at least as many keys as queries."
        )
    if window is not None and window < 1:
        raise InputError(f"attention got window {window}; it must be at least 1, or None.")
    if soft_cap is not None and soft_cap <= 0:
        raise InputError(f"attention got soft_cap {soft_cap}; it must be positive, or None.")
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"attention got dropout {dropout}; it must be in [0, 1).")
    if block_ids is not None and not causal:
        raise InputError(
            "attention got block_ids without causal=True, where tokens see what is ahead anyway; "
            "give causal=True, or leave block_ids out."
        )
    batch = of_key[0]
    for name, ids in (("segment_ids", segment_ids), ("block_ids", block_ids)):
        if ids is None:
            continue
        shape = tuple(ids.shape)
        if len(shape) != 2 or not _fits(shape[0], batch, 1) or not _fits(shape[1], keys):
            raise InputError(
                f"attention got {name} {shape} for key {tuple(key.shape)}; it takes one for each "
                f"key: (batch or 1, length), so ({batch}, {keys})."
            )
        if isinstance(length, int) and isinstance(keys, int) and length > keys:
            raise InputError(
                f"attention with {name} got query {tuple(query.shape)}, key {tuple(key.shape)}; "
                "it needs at least as many keys as queries."
            )


def _fits(size: object, *allowed: object) -> bool:
    """Returns True if a size may be one of these; unknown sizes fit."""
    known = [x for x in (size, *allowed) if isinstance(x, int)]
    return len(known) <= len(allowed) or size in allowed


def hiding_window(window: int | None, query: Tensor, key: Tensor) -> int | None:
    """Returns the window, or None if it is too wide to hide any key."""
    lengths = (*query.shape[1:2], *key.shape[1:2])
    if window is not None and all(isinstance(x, int) and x <= window for x in lengths):
        return None
    return window


# Far below any score, yet finite: softmax over -inf alone is NaN, and so is its gradient.
MASKED = -1e30


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
    """Returns softmax(query @ key.T) @ value, (B, T, N, H).

    `allowed` is bool, broadcastable to (B, N, T, S) with four axes, or `None` for all; if it may be
    empty for a query, that gets zeros. `drop` applies dropout to the weights, (B, N, T, S).
    """
    heads, groups, head_dim = query.shape[2], key.shape[2], query.shape[3]
    batch, length, keys = *ops.shape(query)[:2], ops.shape(key)[1]
    dtype, factor = wide(query), head_dim**-0.5 if scale is None else scale
    narrow = ops.dtype(query) == "float16"
    if narrow:  # products would overflow before they are scaled
        query = ops.cast(ops.cast(query, dtype) * factor, "float16")
    # Heads stand in front of tokens, and those of a group in a row: only inputs are transposed.
    query, key, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
    rows = (batch, groups, heads // groups * length)
    if heads != groups:
        query = ops.reshape(query, (*rows, head_dim))
    scores = ops.cast(ops.einsum("bkth,bksh->bkts", query, key), dtype)
    if heads != groups:
        scores = ops.reshape(scores, (batch, heads, length, keys))
    if not narrow:
        scores = scores * factor
    if soft_cap is not None:
        scores = ops.tanh(scores / soft_cap) * soft_cap
    if allowed is not None:
        scores = ops.where(allowed, scores, ops.cast(MASKED, dtype))
    weights = drop(ops.cast(ops.softmax(scores, axis=-1), ops.dtype(value)))
    if heads != groups:
        weights = ops.reshape(weights, (*rows, keys))
    output = ops.einsum("bkts,bksh->bkth", weights, value)
    if heads != groups:
        output = ops.reshape(output, (batch, heads, length, head_dim))
    if may_be_empty and allowed is not None:
        # Only a mask can leave a query without keys; its weights are uniform here.
        some = ops.any(allowed, axis=-1, keepdims=True)
        output = ops.where(some, output, ops.zeros((), dtype=ops.dtype(output)))
    return ops.transpose(output, (0, 2, 1, 3))


def allowed_pairs(query: Tensor, key: Tensor, hidden: Hidden) -> Any:
    """Joins mask, causal flag, window, segments and blocks.

    Returns:
        bool, four axes, broadcastable to (B, N, T, S), or `None` if every query sees every key.
    """
    length, keys = ops.shape(query)[1], ops.shape(key)[1]
    offset = keys - length
    segments, blocks = [
        None if ids is None else ops.convert_to_tensor(ids)[:, offset:]
        for ids in (hidden.segment_ids, hidden.block_ids)
    ]
    return pairs(hidden, segments, blocks, (offset, length), (0, keys))


def pairs(
    hidden: Hidden,
    segments: Tensor | None,
    blocks: Tensor | None,
    queries: tuple[Any, Any],
    keys: tuple[Any, Any],
) -> Any:
    """Returns the keys that some queries see: bool with four axes, or `None` for all.

    Mask and ids of `hidden` are those of these keys; segments and blocks (b, t) are those of the
    queries. `queries` and `keys` are the position of the first one, and their number.
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
    (first, length), (start, number) = queries, keys
    position = ops.expand_dims(ops.arange(length, dtype="int32") + first, 1)
    behind = position - ops.expand_dims(ops.arange(number, dtype="int32") + start, 0)
    behind = ops.reshape(behind, (1, 1, length, number))
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
    """(b, t), (b, s) -> (b, 1, t, s), True if query and key have the same id."""
    same = ops.equal(ops.expand_dims(own, 2), ops.expand_dims(ids, 1))
    return ops.expand_dims(same, 1)


def cuts(
    length: int, keys: int, ahead: bool, causal: bool, window: int | None, size: int
) -> list[Block]:
    """Returns blocks of `size` queries, without the keys that no query of a block may see.

    There are T queries and S keys; with `ahead` a query may see later keys.
    """
    blocks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first, last = start + keys - length, stop - 1 + keys - length
        low = 0 if window is None else max(first - window + 1, 0)
        high = keys if ahead else last + 1
        if window is not None and not causal:
            high = min(last + window, keys)
        blocks.append(Block(start, low, stop - start, high - low))
    return blocks


# Pairs of query and key from which blocks pay: one of a batch has 2 MB of scores for each head.
PAIRS = 2**19
# Queries of a block: at most, at least, and the scores of a block that set the number between.
MOST, LEAST, SCORES = 256, 64, 2**20
WORD = 2**32


def pays_blockwise(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Returns True if the lengths are known, and large enough for blocks."""
    length, keys = query.shape[1], key.shape[1]
    if not isinstance(length, int) or not isinstance(keys, int):
        return False
    if length <= MOST or length * keys <= PAIRS or isinstance(query, keras.KerasTensor):
        return False
    return mask is None or None not in mask.shape[-2:]


def _blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Hidden,
    words: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    rate: float,
) -> Any:
    """See `kmodels.ops.attention`; `words` key the dropout, `None` without."""
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    length, keys = query.shape[1], key.shape[1]
    *hiding, causal, window = hidden
    hiding = [None if x is None else ops.convert_to_tensor(x) for x in hiding]
    if hiding[0] is not None:
        axes = len(hiding[0].shape)
        hiding[0] = ops.reshape(hiding[0], (1,) * (4 - axes) + tuple(ops.shape(hiding[0])))

    def block(
        start: Tensor,
        low: Tensor,
        size: int,
        width: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        others: tuple[Any, ...],
    ) -> Any:
        mask, segment_ids, block_ids, words = others
        first = start + (keys - length)

        def of_queries(x: Tensor | None, start: Tensor, axis: int = 1) -> Any:
            return None if x is None else cut(x, start, size, axis)

        def of_keys(x: Tensor | None, axis: int = 1) -> Any:
            return None if x is None else cut(x, low, width, axis)

        if mask is not None:
            mask = mask if mask.shape[2] == 1 else of_queries(mask, start, 2)
            mask = mask if mask.shape[3] == 1 else of_keys(mask, 3)
        here = Hidden(mask, of_keys(segment_ids), of_keys(block_ids), causal, window)
        own = of_queries(segment_ids, first), of_queries(block_ids, first)
        allowed = pairs(here, *own, (first, size), (low, width))

        def drop(weights: Tensor) -> Any:
            return weights if words is None else dropped(weights, words, rate, start, low, keys)

        return products(
            of_queries(query, start),
            of_keys(key),
            of_keys(value),
            allowed,
            mask is not None,
            scale,
            soft_cap,
            drop,
        )

    ahead = not causal or hidden.block_ids is not None
    size = max(LEAST, min(MOST, SCORES // keys))
    blocks = cuts(length, keys, ahead, causal, window, size)
    return recompute.blockwise(block, blocks, (query, key, value), (*hiding, words))


def cut(x: Tensor, start: Tensor | int, size: int, axis: int) -> Any:
    """Slices an axis from `start`, a number or a scalar tensor."""
    if size == x.shape[axis]:
        return x
    if isinstance(start, int):
        return x[(slice(None),) * axis + (slice(start, start + size),)]
    begin: list[Tensor | int] = [0] * len(x.shape)
    shape = list(ops.shape(x))
    begin[axis], shape[axis] = start, size
    return ops.slice(x, begin, shape)


def words(seed: keras.random.SeedGenerator | Tensor | int) -> Any:
    """Returns two int32 words (2,) of a seed; the state of a generator advances."""
    if isinstance(seed, keras.random.SeedGenerator):
        return ops.cast(seed.next(), "int32")  # type: ignore[attr-defined]
    if isinstance(seed, int):
        seed = np.array([_signed(seed), 0], "int32")
    return ops.cast(seed, "int32")


def dropped(
    weights: Tensor, words: Tensor, rate: float, start: Tensor, low: Tensor, keys: int
) -> Any:
    """Drops weights (B, ..., t, s) by a hash of their indices, the same whenever recomputed."""
    *outer, size, width = ops.shape(weights)
    rows = 1
    for extent in outer:
        rows = rows * extent
    row = ops.reshape(ops.arange(rows, dtype="int32"), (*outer, 1, 1))
    row = mixed(ops.bitwise_xor(row, words[0]))
    row = mixed(row + ops.expand_dims(ops.arange(size, dtype="int32") + start, 1) + words[1])
    place = ops.arange(width, dtype="int32") + low
    bits = mixed(ops.bitwise_xor(row, mixed(place)))
    stays = bits >= min(round(rate * WORD), WORD - 1) - WORD // 2
    mask = ops.cast(stays, ops.dtype(weights))
    return ops.cast(weights * mask * (1.0 / (1.0 - rate)), ops.dtype(weights))


def mixed(x: Tensor) -> Any:
    """Returns a bijection of 32-bit words that changes half of the bits for each that changes.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018), the function lowbias32.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # The shift of a signed number copies its sign, which the mask removes.
        high = ops.bitwise_and(ops.right_shift(x, shift), (1 << (32 - shift)) - 1)
        x = ops.bitwise_xor(x, high) * _signed(factor)
    return x


def _signed(word: int) -> int:
    """Returns the 32-bit number with these bits."""
    return (word + WORD // 2) % WORD - WORD // 2
