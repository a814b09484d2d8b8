"""Scaled dot product attention."""

from typing import Any

import keras

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops import _attention_blockwise
from kmodels.ops._attention_blockwise import Hidden, allowed_pairs, products
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
        mask: bool, broadcastable to (B, N, T, S), `True` where a query may attend. A query that may
            attend to nothing gets zeros, and passes zero gradients.
        causal: query i sees keys up to i + S - T, so that the last query sees all.
        window: with `causal`, query i at position p = i + S - T sees keys in (p - window, p];
            without, keys j with |p - j| < window.
        segment_ids: (B or 1, S) int; a query sees keys of its own segment only. The queries are the
            last T of the S positions. Padding is a segment of its own.
        block_ids: (B or 1, S) int, negative for none; with `causal`, tokens of one block see each
            other also where that is ahead, as the patches of an image inside a text. Windows still
            hide what is too far behind, and segments and the mask what they hide.
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
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    hidden = Hidden(mask, segment_ids, block_ids, causal, window)
    if _attention_blockwise.pays(query, key, mask):
        words = _attention_blockwise.words(seed) if dropout and seed is not None else None
        return _attention_blockwise.attention(
            query, key, value, hidden, words, scale, soft_cap, dropout
        )
    allowed = allowed_pairs(query, key, mask, causal, window, segment_ids, block_ids)

    def drop(weights: Tensor) -> Any:
        return dropout_op(weights, dropout, seed) if dropout and seed is not None else weights

    return products(query, key, value, allowed, mask is not None, scale, soft_cap, drop)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    dropout: float,
) -> None:
    """Says what is wrong with the arguments of `attention`, as far as static shapes tell.

    Raises:
        InputError: one line with what was given and what is allowed.
    """
    of_query, of_key, of_value = query.shape, key.shape, value.shape

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


def check_ids(
    query: Tensor,
    key: Tensor,
    causal: bool,
    segment_ids: Tensor | None,
    block_ids: Tensor | None,
) -> None:
    """Says what is wrong with the segments and blocks of `attention`, as far as shapes tell.

    Raises:
        InputError: one line with what was given and what is allowed.
    """
    if block_ids is not None and not causal:
        raise InputError(
            "attention got block_ids without causal=True, where tokens see what is ahead anyway; "
            "give causal=True, or leave block_ids out."
        )
    if segment_ids is None and block_ids is None:
        return
    batch, keys = key.shape[:2]
    for name, ids in (("segment_ids", segment_ids), ("block_ids", block_ids)):
        if ids is None:
            continue
        shape = tuple(ids.shape)
        if len(shape) != 2 or not _fits(shape[0], batch, 1) or not _fits(shape[1], keys):
            raise InputError(
                f"attention got {name} {shape} for key {tuple(key.shape)}; it takes one for each "
                f"key: (batch or 1, length), so ({batch}, {keys})."
            )
        if isinstance(query.shape[1], int) and isinstance(keys, int) and query.shape[1] > keys:
            raise InputError(
                f"attention with {name} got query {tuple(query.shape)}, key {tuple(key.shape)}; "
                "it needs at least as many keys as queries."
            )


def _fits(size: object, *allowed: object) -> bool:
    """Returns whether a size may be one of these, of which some may not be known."""
    known = [x for x in (size, *allowed) if isinstance(x, int)]
    return len(known) <= len(allowed) or size in allowed
