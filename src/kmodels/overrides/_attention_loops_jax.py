"""Attention for JAX in loops over blocks of queries, whose weights are computed twice.

Nothing of the size of query times key is kept, and the compiled program does not grow with the
length: a loop goes over blocks of one size that see about equally many keys.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import MASKED, Block, Hidden, loops
from kmodels.overrides import dropout_jax


@dataclass(frozen=True)
class Plan:
    """The sizes and options that are known when the step is traced."""

    blocks: tuple[Block, ...]
    shared: int  # queries at a position that share a key head, G
    offset: int  # position of the first query
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    rate: float  # of dropout


def _products(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: Hidden,
    words: jax.Array | None,
    plan: Plan,
) -> jax.Array:
    """(B, K, T * G, H), (B, K, S, H) twice -> (B, K, T * G, H); a key's G queries lie together.

    The mask has the axes (B, K, T, G, S), each of which may be 1; `words` key the dropout.
    """
    outputs = []
    for loop in loops(plan.blocks):
        size, places = Block(0, 0, loop.size, loop.width), jnp.asarray(loop.places, "int32")

        @jax.checkpoint
        def body(place: jax.Array, size: Block = size) -> jax.Array:
            rows, keys = _cut(query, value, place, size, plan)
            *_, dropped = _weights(query, key, hidden, words, place, size, plan)
            return dot(dropped, 3, keys, 2).astype(rows.dtype)

        outputs.append(_joined(lax.map(body, places)))
    return jnp.concatenate(outputs, axis=2)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    query, key, value, hidden, words, plan = arguments
    return _products(query, key, value, hidden, words, plan), arguments[:-1]


def _backward(plan: Plan, inputs: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, hidden, words = inputs
    dtype, for_query = query.dtype, []
    totals = tuple(jnp.zeros(x.shape, wide(x)) for x in (key, value))
    for loop in loops(plan.blocks):
        size, places = Block(0, 0, loop.size, loop.width), jnp.asarray(loop.places, "int32")

        @jax.checkpoint
        def body(totals: Any, place: jax.Array, size: Block = size) -> Any:
            rows, keys = _cut(query, key, place, size, plan)
            part, values = _cut(gradient, value, place, size, plan)
            weights, slope_of_cap, stays, dropped = _weights(
                query, key, hidden, words, place, size, plan
            )
            slope = dot(part, 3, values, 3)
            if stays is not None:
                slope = slope * stays
            wide = weights.astype(slope.dtype)
            slope = wide * (slope - jnp.sum(slope * wide, axis=-1, keepdims=True))
            if slope_of_cap is not None:
                slope = slope * slope_of_cap
            slope = (slope * plan.scale).astype(dtype)
            found = dot(slope, 2, rows, 2), dot(dropped, 2, part, 2)
            totals = tuple(
                _added(total, x, place[1]) for total, x in zip(totals, found, strict=True)
            )
            return totals, dot(slope, 3, keys, 2).astype(dtype)

        totals, found = lax.scan(body, totals, places)
        for_query.append(_joined(found))
    for_key, for_value = (x.astype(dtype) for x in totals)
    return jnp.concatenate(for_query, axis=2), for_key, for_value, None, None


products = jax.custom_vjp(_products, nondiff_argnums=(5,))
products.defvjp(_forward, _backward)


def _cut(
    rows: jax.Array, keys: jax.Array, place: jax.Array, size: Block, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Returns the block's part of an array by queries and of one by keys."""
    first, count = place[0] * plan.shared, size.size * plan.shared
    return (
        lax.dynamic_slice_in_dim(rows, first, count, 2),
        lax.dynamic_slice_in_dim(keys, place[1], size.width, 2),
    )


def _added(total: jax.Array, x: jax.Array, low: jax.Array) -> jax.Array:
    own = lax.dynamic_slice_in_dim(total, low, x.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(total, own + x, low, 2)


def _joined(x: jax.Array) -> jax.Array:
    """(blocks, B, K, t * G, H) -> (B, K, blocks * t * G, H)."""
    count, batch, groups, rows, width = x.shape
    return x.transpose(1, 2, 0, 3, 4).reshape(batch, groups, count * rows, width)


def _weights(
    query: jax.Array,
    key: jax.Array,
    hidden: Hidden,
    words: jax.Array | None,
    place: jax.Array,
    size: Block,
    plan: Plan,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Returns weights (B, K, t * G, s), the cap's slopes, what stays, and what stays of weights."""
    rows, keys = _cut(query, key, place, size, plan)
    scores = dot(rows, 3, keys, 3) * plan.scale
    slopes = stays = None
    if plan.soft_cap is not None:
        turned = jnp.tanh(scores / plan.soft_cap)
        scores, slopes = turned * plan.soft_cap, 1.0 - turned * turned
    allowed = _allowed(hidden, place, size, plan)
    if allowed is not None:
        split = scores.reshape(*scores.shape[:2], size.size, plan.shared, size.width)
        split = jax.nn.softmax(jnp.where(allowed, split, MASKED), axis=-1)
        if hidden.mask is not None:
            # A query that sees nothing has even weights by now; it gets none.
            split = split * jnp.any(allowed, axis=-1, keepdims=True)
        weights = split.reshape(scores.shape)
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    weights = dropped = weights.astype(query.dtype)
    if words is not None:
        whole = (*query.shape[:3], key.shape[2])
        first = (0, 0, place[0] * plan.shared, place[1])
        kept = dropout_jax.kept_of(words, whole, plan.rate, first, scores.shape)
        stays = kept.astype(scores.dtype) * (1.0 / (1.0 - plan.rate))
        dropped = (weights * stays).astype(query.dtype)
    return weights, slopes, stays, dropped


def _allowed(hidden: Any, place: jax.Array, size: Block, plan: Plan) -> jax.Array | None:
    """Returns which keys the queries of a block see, (B or 1, K or 1, t or 1, G or 1, s or 1)."""
    start, low = place[0], place[1]
    first, allowed = start + plan.offset, None

    def same(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = lax.dynamic_slice_in_dim(ids, first, size.size, 1)[:, None, :, None, None]
        other = lax.dynamic_slice_in_dim(ids, low, size.width, 1)[:, None, None, None]
        return own == other, other

    if plan.causal or plan.window is not None:
        behind = (first + jnp.arange(size.size))[:, None] - low - jnp.arange(size.width)
        behind = behind[None, None, :, None]
        if plan.causal:
            allowed = behind >= 0
            if hidden.block_ids is not None:
                inside, numbers = same(hidden.block_ids)
                allowed = allowed | (inside & (numbers >= 0))
        if plan.window is not None:
            close = (behind if plan.causal else jnp.abs(behind)) < plan.window
            allowed = close if allowed is None else allowed & close
    if hidden.segment_ids is not None:
        inside, _ = same(hidden.segment_ids)
        allowed = inside if allowed is None else allowed & inside
    mask = hidden.mask
    if mask is not None:
        if mask.shape[2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, start, size.size, 2)
        if mask.shape[4] > 1:
            mask = lax.dynamic_slice_in_dim(mask, low, size.width, 4)
        allowed = mask if allowed is None else allowed & mask
    return allowed


def wide(x: jax.Array) -> Any:
    """Returns the dtype of sums over products of this array."""
    return jnp.promote_types(x.dtype, jnp.float32)


def dot(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int) -> jax.Array:
    """Returns the product over these axes for each text and key head, in float32."""
    axes = (((a_axis,), (b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, axes, preferred_element_type=wide(a))
