"""Attention for JAX on CPU: products with float32 results, a block of queries after the other.

XLA takes a slow path for bfloat16 results, copies the operands of grouped heads, and computes what
a causal mask hides; `jax.nn.dot_product_attention` shares that. On accelerators the op stays as it
is: nothing was measured there.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops._attention_blockwise import cuts
from kmodels.ops._attention_parts import MASKED, Hidden, allowed_pairs
from kmodels.ops.attention import attention, check_attention, check_ids
from kmodels.overrides import _attention_loops_jax as loop
from kmodels.overrides import dropout_jax, meshes
from kmodels.overrides.blocks import blocks, near

# Queries of a block: measured between 32 and 256.
SIZE = 64
# Tokens from which on weights are computed again, in loops: keeping them takes length x keys.
LONG = 512
# Queries of a block in a loop, and scores of one that are not to be more if it can be.
LOOP_SIZE, SCORES = 128, 2**21


def supports(call: OpCall) -> str | None:
    """Serves CPUs, except for seeds that are not a generator, and model parallelism."""
    if jax.default_backend() != "cpu":
        return "only on CPU were products by blocks measured to be faster"
    drops = call.dropout and call.seed is not None
    if drops and not isinstance(call.seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if meshes.layers_are_cut():
        return "under ModelParallel heads may lie on several devices"
    if not all(isinstance(size, int) for size in (*call.query.shape[1:], *call.key.shape[1:])):
        return "lengths are not known"  # None, or what jax.export has for them
    return None


@dataclass(frozen=True)
class _Plan:
    """The sizes that are known when the step is traced."""

    blocks: tuple[tuple[int, int, int, int], ...]  # queries from and to, keys from and to
    shared: int  # queries at a position that share a key head, G
    offset: int  # position of the first query
    causal: bool
    window: int | None
    scale: float
    share: float  # what stays after dropout is multiplied by this


@override(attention, supports)
def attention_jax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    block_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | jax.Array | None = None,
) -> jax.Array:
    """Keeps the attention weights of short texts for the way back; else nothing of their size."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    batch, length, heads, head_dim = query.shape
    keys, groups = key.shape[1:3]
    shared = heads // groups
    loops = soft_cap is not None or block_ids is not None or length * keys > LONG**2
    pairs = allowed_pairs(query, key, mask, False, None)
    if pairs is not None:
        # (B or 1, N or 1, T or 1, S or 1) -> (B or 1, K or 1, T or 1, G or 1, S or 1)
        split = (groups, shared) if pairs.shape[1] > 1 else (1, 1)
        pairs = pairs.reshape(pairs.shape[0], *split, *pairs.shape[2:]).swapaxes(2, 3)
    rows = query.reshape(batch, length, groups, shared, head_dim).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(batch, groups, length * shared, head_dim)
    inputs = rows, key.swapaxes(1, 2), value.swapaxes(1, 2)
    segments, images = (None if x is None else jnp.asarray(x) for x in (segment_ids, block_ids))
    words = dropout_jax.words(seed) if dropout and seed is not None else None  # type: ignore[arg-type]
    factor = head_dim**-0.5 if scale is None else scale
    output: Any
    if loops:
        ahead = not causal or images is not None
        size = max(SIZE, min(LOOP_SIZE, SCORES // keys))
        found = cuts(length, keys, ahead, causal, window, size)
        places = shared, keys - length, causal, window
        hidden = Hidden(pairs, segments, images, causal, window)
        plan = loop.Plan(tuple(found), *places, factor, soft_cap, dropout)
        output = loop.products(*inputs, hidden, words, plan)
    else:
        kept, share = None, 1.0
        if words is not None:
            shape = (batch, groups, length * shared, keys)
            kept, share = dropout_jax.kept(words, shape, dropout), 1.0 / (1.0 - dropout)
        plan = _Plan(
            blocks=tuple(
                (queries.start, queries.stop, seen.start, seen.stop)
                for queries, seen in blocks(length, keys, causal, window, SIZE)
            ),
            shared=shared,
            offset=keys - length,
            causal=causal,
            window=window,
            scale=factor,
            share=share,
        )
        output = _products(*inputs, (pairs, segments, kept), plan)
    width = value.shape[3]
    output = output.reshape(batch, groups, length, shared, width).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, length, heads, width)


# (B or 1, K or 1, T or 1, G or 1, S or 1) bool, (B or 1, S) int, and what dropout keeps.
_Hidden = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _products(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: _Hidden,
    plan: _Plan,
) -> jax.Array:
    """(B, K, T * G, H), (B, K, S, H) twice -> (B, K, T * G, H); a key's G queries lie together."""
    return _forward(query, key, value, hidden, plan)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: _Hidden,
    plan: _Plan,
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


def _backward(plan: _Plan, residuals: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
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


_products.defvjp(_forward, _backward)


def _places(block: tuple[int, int, int, int], plan: _Plan) -> tuple[slice, slice]:
    """Returns rows of the queries and of the keys."""
    start, stop, low, high = block
    return slice(start * plan.shared, stop * plan.shared), slice(low, high)


def _softmax(
    scores: jax.Array, hidden: _Hidden, block: tuple[int, int, int, int], plan: _Plan
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


def _near(block: tuple[int, int, int, int], plan: _Plan) -> jax.Array | None:
    """Returns which keys of a block lie where its queries may look, (t, 1, s)."""
    if not plan.causal and plan.window is None:
        return None
    start, stop, low, high = block
    places = (slice(start, stop), slice(low, high))
    return jnp.asarray(near(places, plan.offset, plan.causal, plan.window))[:, None]
