"""Attention for JAX in unrolled products by blocks of queries, whose weights the way back reads.

What a causal mask hides from a whole block is not computed, forward or backward.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import MASKED
from kmodels.overrides import _attention_loops_jax as loop
from kmodels.overrides.blocks import near


@dataclass(frozen=True)
class Plan:
    """The sizes that are known when the step is traced."""

    blocks: tuple[tuple[int, int, int, int], ...]  # queries from and to, keys from and to
    shared: int  # queries at a position that share a key head, G
    offset: int  # position of the first query
    causal: bool
    window: int | None
    scale: float
    share: float  # what stays after dropout is multiplied by this


# (B or 1, K or 1, T or 1, G or 1, S or 1) bool, (B or 1, S) int, and what dropout keeps.
_Hidden = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def products(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: _Hidden,
    plan: Plan,
) -> jax.Array:
    """(B, K, T * G, H), (B, K, S, H) twice -> (B, K, T * G, H); a key's G queries lie together."""
    return _forward(query, key, value, hidden, plan)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: _Hidden,
    plan: Plan,
) -> tuple[jax.Array, Any]:
    outputs, saved, kept = [], [], hidden[2]
    for block in plan.blocks:
        rows, seen = _places(block, plan)
        scores = loop.dot(query[:, :, rows], 3, key[:, :, seen], 3) * plan.scale
        weights = _softmax(scores, hidden, block, plan).astype(query.dtype)
        saved.append(weights)
        if kept is not None:
            weights = weights * kept[:, :, rows, seen].astype(weights.dtype)
        outputs.append(
            (loop.dot(weights, 3, value[:, :, seen], 2) * plan.share).astype(query.dtype)
        )
    return jnp.concatenate(outputs, axis=2), (query, key, value, kept, saved)


def _backward(plan: Plan, residuals: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, kept, saved = residuals
    dtype, for_query = query.dtype, []
    for_key, for_value = (jnp.zeros(x.shape, loop.wide(x)) for x in (key, value))
    for block, weights in zip(plan.blocks, saved, strict=True):
        rows, seen = _places(block, plan)
        part, left = gradient[:, :, rows], weights
        slope = loop.dot(part, 3, value[:, :, seen], 3) * plan.share
        if kept is not None:
            left = weights * kept[:, :, rows, seen].astype(dtype)
            slope = slope * kept[:, :, rows, seen]
        for_value = for_value.at[:, :, seen].add(loop.dot(left, 2, part, 2) * plan.share)
        wide = weights.astype(slope.dtype)
        slope = wide * (slope - jnp.sum(slope * wide, axis=-1, keepdims=True))
        slope = (slope * plan.scale).astype(dtype)
        for_query.append(loop.dot(slope, 3, key[:, :, seen], 2).astype(dtype))
        for_key = for_key.at[:, :, seen].add(loop.dot(slope, 2, query[:, :, rows], 2))
    found = (jnp.concatenate(for_query, axis=2), for_key.astype(dtype), for_value.astype(dtype))
    return (*found, None)


products.defvjp(_forward, _backward)


def _places(block: tuple[int, int, int, int], plan: Plan) -> tuple[slice, slice]:
    """Returns rows of the queries and of the keys."""
    start, stop, low, high = block
    return slice(start * plan.shared, stop * plan.shared), slice(low, high)


def _softmax(
    scores: jax.Array, hidden: _Hidden, block: tuple[int, int, int, int], plan: Plan
) -> jax.Array:
    """Returns attention weights of a block of scores (B, K, t * G, s)."""
    start, stop, low, high = block
    split = scores.reshape(*scores.shape[:2], stop - start, plan.shared, high - low)
    allowed, (mask, segments, _) = _near(block, plan), hidden
    if segments is not None:
        own = segments[:, None, start + plan.offset : stop + plan.offset, None, None]
        same = own == segments[:, None, None, None, low:high]
        allowed = same if allowed is None else same & allowed
    if mask is not None:
        part = mask[:, :, slice(start, stop) if mask.shape[2] > 1 else slice(None)]
        part = part[..., slice(low, high) if mask.shape[4] > 1 else slice(None)]
        allowed = part if allowed is None else part & allowed
    if allowed is None:
        return jax.nn.softmax(scores, axis=-1)
    weights = jax.nn.softmax(jnp.where(allowed, split, MASKED), axis=-1)
    if mask is not None:
        # A query that sees nothing has even weights by now; it gets none.
        weights = weights * jnp.any(allowed, axis=-1, keepdims=True)
    return weights.reshape(scores.shape)


def _near(block: tuple[int, int, int, int], plan: Plan) -> jax.Array | None:
    """Returns which keys of a block lie where its queries may look, (t, 1, s)."""
    if not plan.causal and plan.window is None:
        return None
    start, stop, low, high = block
    places = (slice(start, stop), slice(low, high))
    return jnp.asarray(near(places, plan.offset, plan.causal, plan.window))[:, None]
