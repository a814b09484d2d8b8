"""Attention for JAX by blocks of queries: the computation of one block, and the loop over them.

The backward pass recomputes the weights: no array has the size of queries times keys, and the
program does not grow with the length, because a loop runs over blocks of one size that see about
equally many keys.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._recompute import Block, Loop, loops
from kmodels.ops.attention import MASKED, Hidden
from kmodels.overrides import dropout_jax

Number = jax.Array | int
Place = jax.Array  # first query and first key of a block


@dataclass(frozen=True)
class Options:
    """The sizes and options that are known when the step is traced."""

    shared: int  # queries at a position that share a key head, G
    offset: int  # keys before the first query, S - T
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    rate: float  # of dropout; 0 if nothing is dropped
    whole: tuple[int, int, int, int]  # (B, K, T * G, S), the weights of all devices

    @property
    def share(self) -> float:
        """Returns the factor of the weights that dropout keeps."""
        return 1.0 / (1.0 - self.rate)


@dataclass(frozen=True)
class Plan(Options):
    """The blocks of a device that holds whole rows."""

    blocks: tuple[Block, ...]


class Own(NamedTuple):
    """Queries (b, K, t * G, H), and the keys hidden from them, by mask (b, K, t, G, S) and ids."""

    query: jax.Array
    mask: jax.Array | None  # each axis may be 1
    segments: jax.Array | None  # (b or 1, t), like images
    images: jax.Array | None
    words: jax.Array | None  # key the dropout
    first: Number = 0  # position of the first query among the keys
    row: Number = 0  # number of the first row of the batch


class Held(NamedTuple):
    """Keys and values (b, K, s, H), and their ids (b or 1, s)."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None
    images: jax.Array | None


class Seen(NamedTuple):
    """Keys that are here, and their positions."""

    held: Held
    first: Number  # position of the first one in its row
    checked: bool  # whether causal masks or windows may hide one


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def products(
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
    return _forward(query, key, value, hidden, words, plan)[0]


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    plan, outputs = arguments[-1], []
    own, seen = _sides(*arguments)

    def step(place: Place, size: Loop) -> jax.Array:
        weights, _ = _weights(own, seen, place, size, plan)
        kept = kept_of(own, seen, place, size, plan)
        if kept is not None:
            weights = weights * kept.astype(weights.dtype)
        product = dot(weights, 3, keys_of(seen.held.value, place, size), 2) * plan.share
        return product.astype(own.query.dtype)

    for loop in loops(plan.blocks):
        body = jax.checkpoint(lambda place, loop=loop: step(place, loop))
        outputs.append(_joined(lax.map(body, jnp.asarray(loop.places, "int32"))))
    return jnp.concatenate(outputs, axis=2), arguments[:-1]


def _backward(plan: Plan, inputs: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, hidden, words = inputs
    own, seen = _sides(query, key, value, hidden, words, plan)
    dtype, for_query = own.query.dtype, []
    totals: Any = tuple(jnp.zeros(x.shape, wide(x)) for x in seen.held[:2])

    def step(totals: Any, place: Place, size: Loop) -> Any:
        weights, of_cap = _weights(own, seen, place, size, plan)
        kept = kept_of(own, seen, place, size, plan)
        part = rows_of(gradient, place, size, plan)
        for_rows, *of_others = slopes(own, seen, place, size, plan, part, weights, of_cap, kept)
        totals = tuple(added(x, y, place[1]) for x, y in zip(totals, of_others, strict=True))
        return totals, for_rows.astype(dtype)

    for loop in loops(plan.blocks):
        body = jax.checkpoint(lambda sums, place, loop=loop: step(sums, place, loop))
        totals, stacked = lax.scan(body, totals, jnp.asarray(loop.places, "int32"))
        for_query.append(_joined(stacked))
    for_key, for_value = (x.astype(dtype) for x in totals)
    return jnp.concatenate(for_query, axis=2), for_key, for_value, None, None


products.defvjp(_forward, _backward)


def _sides(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: Any,
    words: jax.Array | None,
    plan: Plan,
) -> tuple[Own, Seen]:
    mask, *ids = hidden[:3]
    segments, images = (None if x is None else x[:, plan.offset :] for x in ids)
    own = Own(query, mask, segments, images, words, plan.offset)
    return own, Seen(Held(key, value, *ids), 0, plan.causal or plan.window is not None)


def _joined(x: jax.Array) -> jax.Array:
    """(blocks, B, K, t * G, H) -> (B, K, blocks * t * G, H)."""
    count, batch, groups, rows, width = x.shape
    return x.transpose(1, 2, 0, 3, 4).reshape(batch, groups, count * rows, width)


def _weights(
    own: Own, seen: Seen, place: Place, size: Loop, options: Options
) -> tuple[jax.Array, jax.Array | None]:
    """Returns softmax weights (b, K, t * G, s) in the query's dtype, and the cap's slopes."""
    scores, of_cap, allowed = scores_of(own, seen, place, size, options)
    weights = jax.nn.softmax(scores, axis=-1)
    if allowed is not None and own.mask is not None:
        # A query that sees nothing has uniform weights here; they become zero.
        weights = weights * jnp.any(allowed, axis=-1, keepdims=True)
    return merged(weights).astype(own.query.dtype), of_cap


def scores_of(
    own: Own, seen: Seen, place: Place, size: Loop, options: Options
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns masked scores (b, K, t, G, s), the cap's slopes (b, K, t * G, s), and `allowed`."""
    rows, keys = rows_of(own.query, place, size, options), keys_of(seen.held.key, place, size)
    scores, of_cap = dot(rows, 3, keys, 3) * options.scale, None
    if options.soft_cap is not None:
        turned = jnp.tanh(scores / options.soft_cap)
        scores, of_cap = turned * options.soft_cap, 1.0 - turned * turned
    scores = scores.reshape(*scores.shape[:2], size.size, options.shared, size.width)
    allowed = _allowed(own, seen, place, size, options)
    if allowed is not None:
        scores = jnp.where(allowed, scores, MASKED)
    return scores, of_cap, allowed


def slopes(
    own: Own,
    seen: Seen,
    place: Place,
    size: Loop,
    options: Options,
    gradient: jax.Array,
    weights: jax.Array,
    of_cap: jax.Array | None,
    kept: jax.Array | None,
    inner: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the contributions of a block to the gradients of queries, keys, values, in float32.

    `gradient` is that of the block's outputs, (b, K, t * G, H), `weights` (b, K, t * G, s) are
    those before dropout, `kept` is False for dropped ones, `of_cap` has the slopes of the soft cap.
    `inner` (b, K, t * G) has sums of gradient times output; None if the block sees all keys.
    """
    dtype = own.query.dtype
    rows, keys = rows_of(own.query, place, size, options), keys_of(seen.held.key, place, size)
    slope = dot(gradient, 3, keys_of(seen.held.value, place, size), 3) * options.share
    left, full = weights, weights.astype(slope.dtype)
    if kept is not None:
        left, slope = weights * kept.astype(weights.dtype), slope * kept
    if inner is None:
        inner = jnp.sum(slope * full, axis=-1)
    slope = full * (slope - inner[..., None])
    if of_cap is not None:
        slope = slope * of_cap
    slope = (slope * options.scale).astype(dtype)
    for_value = dot(left.astype(dtype), 2, gradient, 2) * options.share
    return dot(slope, 3, keys, 2), dot(slope, 2, rows, 2), for_value


def kept_of(own: Own, seen: Seen, place: Place, size: Loop, options: Options) -> jax.Array | None:
    """Returns which weights of a block dropout keeps, the same however rows are cut."""
    if own.words is None:
        return None
    rows, groups = own.query.shape[:2]
    shape = (rows, groups, size.size * options.shared, size.width)
    query = (own.first - options.offset + place[0]) * options.shared
    first = (own.row, 0, query, seen.first + place[1])
    return dropout_jax.kept_of(own.words, options.whole, options.rate, first, shape)


def rows_of(x: jax.Array, place: Place, size: Loop, options: Options) -> jax.Array:
    """(b, K, T * G, ...) -> (b, K, t * G, ...)."""
    first, count = place[0] * options.shared, size.size * options.shared
    return lax.dynamic_slice_in_dim(x, first, count, 2)


def keys_of(x: jax.Array, place: Place, size: Loop) -> jax.Array:
    """(b, K, S, H) -> (b, K, s, H)."""
    return lax.dynamic_slice_in_dim(x, place[1], size.width, 2)


def added(total: jax.Array, x: jax.Array, low: Number) -> jax.Array:
    """Returns the gradients of keys with those of a block added, from the key `low` on."""
    own = lax.dynamic_slice_in_dim(total, low, x.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(total, own + x, low, 2)


def merged(x: jax.Array) -> jax.Array:
    """(b, K, t, G, s) -> (b, K, t * G, s)."""
    batch, groups, queries, shared, keys = x.shape
    return x.reshape(batch, groups, queries * shared, keys)  # -1 would not do for a batch of 0


def _allowed(own: Own, seen: Seen, place: Place, size: Loop, options: Options) -> jax.Array | None:
    """Returns which keys the queries of a block see, (b or 1, K or 1, t or 1, G or 1, s or 1)."""
    held, allowed = seen.held, None

    def same(ids: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array]:
        mine = lax.dynamic_slice_in_dim(ids, place[0], size.size, 1)[:, None, :, None, None]
        theirs = lax.dynamic_slice_in_dim(others, place[1], size.width, 1)[:, None, None, None]
        return mine == theirs, theirs

    if seen.checked:
        query = own.first + place[0] + jnp.arange(size.size)
        behind = query[:, None] - (seen.first + place[1] + jnp.arange(size.width))
        behind = behind[None, None, :, None]
        if options.causal:
            allowed = behind >= 0
            if own.images is not None and held.images is not None:
                inside, numbers = same(own.images, held.images)
                allowed = allowed | (inside & (numbers >= 0))
        if options.window is not None:
            close = (behind if options.causal else jnp.abs(behind)) < options.window
            allowed = close if allowed is None else allowed & close
    if own.segments is not None and held.segments is not None:
        inside, _ = same(own.segments, held.segments)
        allowed = inside if allowed is None else allowed & inside
    mask = own.mask
    if mask is not None:
        if mask.shape[2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, place[0], size.size, 2)
        if mask.shape[4] > 1:
            mask = lax.dynamic_slice_in_dim(mask, seen.first + place[1], size.width, 4)
        allowed = mask if allowed is None else allowed & mask
    return allowed


def wide(x: jax.Array) -> Any:
    """Returns the dtype of sums over products of this array."""
    return jnp.promote_types(x.dtype, jnp.float32)


def dot(a: jax.Array, a_axis: int, b: jax.Array, b_axis: int) -> jax.Array:
    """Returns the product over these axes for each text and key head, in float32."""
    axes = (((a_axis,), (b_axis,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, axes, preferred_element_type=wide(a))
