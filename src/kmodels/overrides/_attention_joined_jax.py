"""Blocks of queries that meet some keys: a running softmax, and the gradients of one.

What a query has seen so far is a maximum, a sum and weighted values, which the next keys change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import MASKED, Block, loops
from kmodels.overrides import dropout_jax
from kmodels.overrides._attention_hops_jax import Held, Hidden, Plan, State
from kmodels.overrides._attention_loops_jax import dot, wide


class Seen(NamedTuple):
    """Keys that are here, and where they stand."""

    held: Held
    origin: jax.Array | int  # place of the first one in its row
    checked: bool  # whether a query may stand where it does not see one


class Device(NamedTuple):
    """What a device has of its own: (b, K, t * G, H), its hidden keys, and its first place."""

    query: jax.Array
    hidden: Hidden
    words: jax.Array | None
    first: jax.Array


# Takes what queries have seen, keys, the first query and the first key of a block, and its sizes.
Step = Callable[[State, Seen, jax.Array, Block], State]


def each(step: Step, state: State, seen: Seen, blocks: list[Block]) -> Any:
    """Repeats state = step(state, seen, first query and first key, sizes) over blocks."""
    for loop in loops(blocks):
        size = Block(0, 0, loop.size, loop.width)

        @jax.checkpoint
        def body(state: State, place: jax.Array, size: Block = size) -> Any:
            return step(state, seen, place, size), None

        state, _ = lax.scan(body, state, jnp.asarray(loop.places, "int32"))
    return state


def add_block(
    device: Device, plan: Plan, state: State, seen: Seen, place: jax.Array, size: Block
) -> State:
    """Joins the keys of a block to the running softmax of its queries."""
    rows = [_rows(x, place, size, plan) for x in state]
    top, total, output = rows
    scores, _, allowed = _scores(device, seen, place, size, plan)
    highest = jnp.maximum(top, jnp.max(scores, axis=-1))
    decay = jnp.exp(top - highest)
    weights = jnp.exp(scores - highest[..., None])
    if allowed is not None:
        weights = jnp.where(allowed, weights, 0.0)
    total = total * decay + jnp.sum(weights, axis=-1)
    if device.words is not None:
        weights = weights * _stays(device, seen, place, scores.shape, plan)
    values = lax.dynamic_slice_in_dim(seen.held.value, place[1], size.width, 2)
    found = dot(weights.astype(device.query.dtype), 3, values, 2)
    new = (highest, total, output * decay[..., None] + found)
    return tuple(_put(x, part, place, plan) for x, part in zip(state, new, strict=True))  # type: ignore[return-value]


def add_slopes(
    device: Device,
    plan: Plan,
    gradient: jax.Array,
    inner: jax.Array,
    logs: jax.Array,
    state: State,
    seen: Seen,
    place: jax.Array,
    size: Block,
) -> Any:
    """Adds what a block gives to the gradients of queries, keys and values."""
    for_query, for_key, for_value = state
    dtype = device.query.dtype
    part, inner, logs = (_rows(x, place, size, plan) for x in (gradient, inner, logs))
    scores, of_cap, allowed = _scores(device, seen, place, size, plan)
    weights = jnp.exp(scores - logs[..., None])
    if allowed is not None:
        weights = jnp.where(allowed, weights, 0.0)
    keys, values = (lax.dynamic_slice_in_dim(x, place[1], size.width, 2) for x in seen.held[:2])
    slope, dropped = dot(part, 3, values, 3), weights
    if device.words is not None:
        stays = _stays(device, seen, place, scores.shape, plan)
        slope, dropped = slope * stays, weights * stays
    slope = weights * (slope - inner[..., None])
    if of_cap is not None:
        slope = slope * of_cap
    slope = (slope * plan.scale).astype(dtype)
    rows = _rows(device.query, place, size, plan)
    more = _rows(for_query, place, size, plan) + dot(slope, 3, keys, 2)
    found = dot(slope, 2, rows, 2), dot(dropped.astype(dtype), 2, part, 2)
    totals = (_added(x, y, place[1]) for x, y in zip((for_key, for_value), found, strict=True))
    return (_put(for_query, more, place, plan), *totals)


def _rows(x: jax.Array, place: jax.Array, size: Block, plan: Plan) -> jax.Array:
    count = size.size * plan.shared
    return lax.dynamic_slice_in_dim(x, place[0] * plan.shared, count, 2)


def _put(x: jax.Array, part: jax.Array, place: jax.Array, plan: Plan) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, place[0] * plan.shared, 2)


def _added(total: jax.Array, x: jax.Array, low: jax.Array) -> jax.Array:
    own = lax.dynamic_slice_in_dim(total, low, x.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(total, own + x, low, 2)


def _scores(
    device: Device, seen: Seen, place: jax.Array, size: Block, plan: Plan
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns scores (b, K, t * G, s), the slopes of the cap, and which of them count."""
    rows = _rows(device.query, place, size, plan)
    keys = lax.dynamic_slice_in_dim(seen.held.key, place[1], size.width, 2)
    scores, of_cap = dot(rows, 3, keys, 3) * plan.scale, None
    if plan.soft_cap is not None:
        turned = jnp.tanh(scores / plan.soft_cap)
        scores, of_cap = turned * plan.soft_cap, 1.0 - turned * turned
    allowed = _allowed(device, seen, place, size, plan)
    if allowed is None:
        return scores, of_cap, None
    split = (*scores.shape[:2], size.size, plan.shared, size.width)
    allowed = jnp.broadcast_to(allowed, split).reshape(scores.shape)
    return jnp.where(allowed, scores, MASKED), of_cap, allowed


def _allowed(
    device: Device, seen: Seen, place: jax.Array, size: Block, plan: Plan
) -> jax.Array | None:
    """Returns which keys the queries of a block see, (b or 1, K or 1, t or 1, G or 1, s)."""
    hidden, held, allowed = device.hidden, seen.held, None

    def same(own: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = lax.dynamic_slice_in_dim(own, place[0], size.size, 1)[:, None, :, None, None]
        ids = lax.dynamic_slice_in_dim(ids, place[1], size.width, 1)[:, None, None, None]
        return own == ids, ids

    if seen.checked:
        first = device.first + place[0] + jnp.arange(size.size)
        behind = first[:, None] - (seen.origin + place[1] + jnp.arange(size.width))
        behind = behind[None, None, :, None]
        if plan.causal:
            allowed = behind >= 0
            if hidden.images is not None and held.images is not None:
                inside, numbers = same(hidden.images, held.images)
                allowed = allowed | (inside & (numbers >= 0))
        if plan.window is not None:
            close = (behind if plan.causal else jnp.abs(behind)) < plan.window
            allowed = close if allowed is None else allowed & close
    if hidden.segments is not None and held.segments is not None:
        inside, _ = same(hidden.segments, held.segments)
        allowed = inside if allowed is None else allowed & inside
    if hidden.mask is not None:
        mask = hidden.mask
        if mask.shape[2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, place[0], size.size, 2)
        if mask.shape[4] > 1:
            mask = lax.dynamic_slice_in_dim(mask, seen.origin + place[1], size.width, 4)
        allowed = mask if allowed is None else allowed & mask
    return allowed


def _stays(
    device: Device, seen: Seen, place: jax.Array, shape: tuple[int, ...], plan: Plan
) -> jax.Array:
    """Returns what weights are multiplied by: 0 where they are dropped, as on one device."""
    assert device.words is not None
    rows, groups, length = device.query.shape[:3]
    whole = (plan.batch, groups, length * plan.parts, length // plan.shared * plan.parts)
    row = lax.axis_index(plan.rows) * rows if plan.rows else 0
    first = (row, 0, (device.first + place[0]) * plan.shared, seen.origin + place[1])
    kept = dropout_jax.kept_of(device.words, whole, plan.rate, first, shape)
    return kept.astype(wide(device.query)) * (1.0 / (1.0 - plan.rate))
