"""Attention for JAX over tokens that lie in parts on several devices, a part of the keys at a time.

Each device keeps its queries. Without a window, keys and values go round a ring, and a running
maximum and sum join the softmax over the parts (Liu et al. 2023, arXiv:2310.01889). With a window,
a device asks the devices just before it for the tokens that its first query sees, and no other.
The way back computes weights again from the log of their sums, and gradients of keys and values go
round with them. Parts are runs of neighbouring tokens, so that a window has one neighbour.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import Block
from kmodels.ops._attention_parts import MASKED, Hidden
from kmodels.ops._recompute_jax import groups
from kmodels.overrides import dropout_jax
from kmodels.overrides._attention_loops_jax import dot, wide


@dataclass(frozen=True)
class Plan:
    """The sizes and options that are known when the step is traced."""

    axis: str  # of the mesh, along which tokens lie
    parts: int  # devices on it
    rows: tuple[str, ...]  # axes of the mesh along which the batch lies
    batch: int  # rows in all
    shared: int  # queries at a position that share a key head, G
    size: int  # queries of a block
    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    rate: float  # of dropout


class Hop(NamedTuple):
    """Some keys of the device `distance` places before this one, negative for one behind it."""

    distance: int
    low: int
    high: int


class Held(NamedTuple):
    """What goes from device to device: (b, K, s, H) twice, and ids (b or 1, s)."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None
    images: jax.Array | None


class _Seen(NamedTuple):
    """Keys that are here, and where they stand."""

    held: Held
    origin: jax.Array | int  # place of the first one in its row
    checked: bool  # whether a query may stand where it does not see one


class _Device(NamedTuple):
    """What a device has of its own: (b, K, t * G, H), its hidden keys, and its first place."""

    query: jax.Array
    hidden: Hidden
    words: jax.Array | None
    first: jax.Array


# Maximum and sum (b, K, t * G), and the sum of weighted values (b, K, t * G, H).
_State = tuple[jax.Array, jax.Array, jax.Array]


def _products(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: Hidden,
    words: jax.Array | None,
    plan: Plan,
) -> jax.Array:
    """(b, K, t * G, H), (b, K, t, H) twice -> (b, K, t * G, H), inside of `shard_map`.

    The mask has the axes (b, K, t, G, S), each of which may be 1, with the keys of whole rows; ids
    are those of this device. `words` key the dropout, which is that of one device.
    """
    return _forward(query, key, value, hidden, words, plan)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: Hidden,
    words: jax.Array | None,
    plan: Plan,
) -> tuple[jax.Array, Any]:
    own = Held(key, value, hidden.segment_ids, hidden.block_ids)
    device, length = _device(query, own, hidden, words, plan), key.shape[2]
    top = jnp.full(query.shape[:3], MASKED, wide(query))
    state: _State = (top, jnp.zeros_like(top), jnp.zeros((*top.shape, value.shape[3]), top.dtype))
    step = partial(_add_block, device, plan)
    hops = near(plan, length, hidden.block_ids is not None)
    if hops is None:

        def turn(state: _State, held: Held, number: jax.Array | int) -> _State:
            return _when_seen(plan, device, own, held, number, step, state)

        state = _each(step, state, _own(device, own, plan), own_blocks(plan, device.hidden, length))
        state = _ring(plan, own, state, turn)
    else:
        for hop in hops:
            seen = _hop(plan, device, own, hop)
            blocks = hop_blocks(plan, hop, length)
            if hop.distance == 0:
                state = _each(step, state, seen, blocks)
            else:
                run = partial(_each, step, seen=seen, blocks=blocks)
                state = lax.cond(_there(plan, hop), run, lambda state: state, state)
    top, total, output = state
    some = total > 0
    total = jnp.where(some, total, 1.0)
    output = (output / total[..., None]).astype(query.dtype)
    return output, (query, key, value, hidden, words, output, top + jnp.log(total))


def _backward(plan: Plan, kept: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, hidden, words, output, logs = kept
    own = Held(key, value, hidden.segment_ids, hidden.block_ids)
    device, length = _device(query, own, hidden, words, plan), key.shape[2]
    inner = jnp.sum(gradient.astype(logs.dtype) * output.astype(logs.dtype), axis=-1)
    step = partial(_add_slopes, device, plan, gradient, inner, logs)
    for_query = jnp.zeros(query.shape, wide(query))
    totals = tuple(jnp.zeros(x.shape, wide(x)) for x in (key, value))
    hops = near(plan, length, hidden.block_ids is not None)
    if hops is None:
        blocks = own_blocks(plan, hidden, length)
        for_query, *totals = _each(step, (for_query, *totals), _own(device, own, plan), blocks)

        def turn(state: Any, held: Held, number: jax.Array | int) -> Any:
            for_query, *totals = state
            state = (for_query, *_sent(tuple(totals), plan, 1))
            return _when_seen(plan, device, own, held, number, step, state)

        for_query, *totals = _ring(plan, own, (for_query, *totals), turn)
        totals = _sent(tuple(totals), plan, 1)
    else:
        for hop in hops:
            seen, blocks = _hop(plan, device, own, hop), hop_blocks(plan, hop, length)
            zeros = tuple(jnp.zeros(x.shape, wide(x)) for x in seen.held[:2])
            run = partial(_each, step, seen=seen, blocks=blocks)
            state = (for_query, *zeros)
            if hop.distance == 0:
                for_query, *totals = run(state)
                continue
            for_query, *found = lax.cond(_there(plan, hop), run, lambda state: state, state)
            found = tuple(x.astype(query.dtype) for x in found)
            found = _sent(found, plan, -hop.distance, wraps=False)
            totals = [
                total.at[:, :, hop.low : hop.high].add(x.astype(total.dtype))
                for total, x in zip(totals, found, strict=True)
            ]
    return (*(x.astype(query.dtype) for x in (for_query, *totals)), None, None)


products = jax.custom_vjp(_products, nondiff_argnums=(5,))
products.defvjp(_forward, _backward)


def near(plan: Plan, length: int, ahead: bool) -> list[Hop] | None:
    """Returns which keys a device with so many tokens needs, or None for those of all devices.

    Args:
        plan: the options.
        length: tokens of a device.
        ahead: whether blocks may let a query see what is ahead of it.
    """
    window = plan.window
    if window is None or ahead:
        return None
    reach = min(-(-(window - 1) // length), plan.parts - 1)
    found = [Hop(i, max(i * length - window + 1, 0), length) for i in range(reach + 1)]
    if plan.causal:
        return found
    if 2 * reach >= plan.parts:
        return None  # to both sides it would be more than the ring
    highs = [min(window + length - 1 - i * length, length) for i in range(1, reach + 1)]
    return [*found, *(Hop(-i, 0, high) for i, high in enumerate(highs, start=1))]


def hop_blocks(plan: Plan, hop: Hop, length: int) -> list[Block]:
    """Returns blocks of queries and the keys of a hop that they see; blocks without any are out."""
    found, window, gap = [], plan.window or 0, hop.distance * length
    for start in range(0, length, plan.size):
        stop = min(start + plan.size, length)
        low = max(gap + start - window + 1, hop.low)
        high = min(gap + stop - 1 + (1 if plan.causal else window), hop.high)
        if high > low:
            found.append(Block(start, low - hop.low, stop - start, high - low))
    return found


def own_blocks(plan: Plan, hidden: Hidden, length: int) -> list[Block]:
    """Returns blocks of queries and the keys of their own device that they may see."""
    ahead = not plan.causal or hidden.block_ids is not None
    found = []
    for start in range(0, length, plan.size):
        stop = min(start + plan.size, length)
        found.append(Block(start, 0, stop - start, length if ahead else stop))
    return found


def _device(
    query: jax.Array, own: Held, hidden: Hidden, words: jax.Array | None, plan: Plan
) -> _Device:
    first = lax.axis_index(plan.axis) * own.key.shape[2]
    return _Device(query, hidden, words, first)


def _own(device: _Device, own: Held, plan: Plan) -> _Seen:
    return _Seen(own, device.first, plan.causal or plan.window is not None)


def _hop(plan: Plan, device: _Device, own: Held, hop: Hop) -> _Seen:
    """Returns the keys of a hop, which their device sends at once."""
    cut = slice(hop.low, hop.high)
    held = Held(
        own.key[:, :, cut],
        own.value[:, :, cut],
        *(None if x is None else x[:, cut] for x in own[2:]),
    )
    if hop.distance:
        held = _sent(held, plan, hop.distance, wraps=False)
    origin = device.first - hop.distance * own.key.shape[2] + hop.low
    return _Seen(held, origin, True)


def _there(plan: Plan, hop: Hop) -> jax.Array:
    """Returns whether there is a device at this distance."""
    other = lax.axis_index(plan.axis) - hop.distance
    return (other >= 0) & (other < plan.parts)


def _sent(tree: Any, plan: Plan, places: int, wraps: bool = True) -> Any:
    """Returns what the device so many places before this one has."""
    targets = [(i, i + places) for i in range(plan.parts)]
    if wraps:
        pairs = [(source, target % plan.parts) for source, target in targets]
    else:
        pairs = [(source, target) for source, target in targets if 0 <= target < plan.parts]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.axis, pairs), tree)


def _ring(plan: Plan, own: Held, state: Any, turn: Callable[[Any, Held, Any], Any]) -> Any:
    """Repeats state = turn(state, keys of another device, number) for all other devices.

    Keys are sent on before their turn is computed, so that both can go on at once.
    """
    held = _sent(own, plan, 1)

    def body(carried: tuple[Any, Held], number: jax.Array) -> tuple[tuple[Any, Held], None]:
        state, held = carried
        following = _sent(held, plan, 1)
        return (turn(state, held, number), following), None

    if plan.parts > 2:
        numbers = jnp.arange(1, plan.parts - 1)
        (state, held), _ = lax.scan(body, (state, held), numbers)
    return turn(state, held, plan.parts - 1)


def _when_seen(
    plan: Plan,
    device: _Device,
    own: Held,
    held: Held,
    number: jax.Array | int,
    step: Callable[..., Any],
    state: Any,
) -> Any:
    """Runs all blocks with the keys that came over `number` places, if queries see any of them."""
    length, images = own.key.shape[2], own.images is not None
    index = lax.axis_index(plan.axis)
    origin = (index - number) % plan.parts * length
    ahead = not plan.causal or images
    checked = plan.window is not None or (plan.causal and images)
    every = range(0, length, plan.size)
    blocks = [Block(start, 0, min(plan.size, length - start), length) for start in every]
    run = partial(_each, step, seen=_Seen(held, origin, checked), blocks=blocks)
    if ahead:
        return run(state)
    return lax.cond(number <= index, run, lambda state: state, state)


def _each(step: Callable[..., Any], state: Any, seen: _Seen, blocks: list[Block]) -> Any:
    """Repeats state = step(state, seen, first query and first key, sizes) over blocks."""
    for group in groups(blocks):
        width = max(block.width for block in group)
        size = Block(0, 0, group[0].size, width)
        # The last key stays; more in front, which are hidden, make widths equal.
        places = [(x.start, max(x.low + x.width - width, 0)) for x in group]

        @jax.checkpoint
        def body(state: Any, place: jax.Array, size: Block = size) -> Any:
            return step(state, seen, place, size), None

        state, _ = lax.scan(body, state, jnp.asarray(places, "int32"))
    return state


def _add_block(
    device: _Device, plan: Plan, state: _State, seen: _Seen, place: jax.Array, size: Block
) -> _State:
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


def _add_slopes(
    device: _Device,
    plan: Plan,
    gradient: jax.Array,
    inner: jax.Array,
    logs: jax.Array,
    state: Any,
    seen: _Seen,
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
    keys, values = (
        lax.dynamic_slice_in_dim(x, place[1], size.width, 2) for x in seen.held[:2]
    )
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
    device: _Device, seen: _Seen, place: jax.Array, size: Block, plan: Plan
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
    device: _Device, seen: _Seen, place: jax.Array, size: Block, plan: Plan
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
            if hidden.block_ids is not None and held.images is not None:
                inside, numbers = same(hidden.block_ids, held.images)
                allowed = allowed | (inside & (numbers >= 0))
        if plan.window is not None:
            close = (behind if plan.causal else jnp.abs(behind)) < plan.window
            allowed = close if allowed is None else allowed & close
    if hidden.segment_ids is not None and held.segments is not None:
        inside, _ = same(hidden.segment_ids, held.segments)
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
    device: _Device, seen: _Seen, place: jax.Array, shape: tuple[int, ...], plan: Plan
) -> jax.Array:
    """Returns what weights are multiplied by: 0 where they are dropped, as on one device."""
    assert device.words is not None
    rows, groups, length = device.query.shape[:3]
    whole = (plan.batch, groups, length * plan.parts, length // plan.shared * plan.parts)
    row = lax.axis_index(plan.rows) * rows if plan.rows else 0
    first = (row, 0, (device.first + place[0]) * plan.shared, seen.origin + place[1])
    kept = dropout_jax.kept_of(device.words, whole, plan.rate, first, shape)
    return kept.astype(wide(device.query)) * (1.0 / (1.0 - plan.rate))
