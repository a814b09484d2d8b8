"""Ring attention for JAX: tokens are sharded over devices, and keys arrive shard by shard.

Each device keeps its queries; a running maximum and sum join the softmax over the shards of keys
(Liu et al. 2023, arXiv:2310.01889). The backward pass recomputes the weights from the log of their
sums, and the gradients of keys and values travel with them. Without a window, keys and values go
round a ring. With a window, a device receives only the tokens that its queries see from the devices
next to it. A shard is a run of neighboring tokens, so a window mostly needs one neighbor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._recompute import Block, Loop, loops
from kmodels.ops.attention import MASKED, Hidden, cuts
from kmodels.overrides._attention_blocks_jax import (
    Held,
    Number,
    Options,
    Own,
    Place,
    Seen,
    added,
    dot,
    kept_of,
    keys_of,
    merged,
    rows_of,
    scores_of,
    slopes,
    wide,
)


@dataclass(frozen=True)
class Plan(Options):
    """The options, and how rows and tokens are cut."""

    axis: str  # of the mesh, along which tokens lie
    parts: int  # devices on it
    rows: tuple[str, ...]  # axes of the mesh along which the batch lies
    size: int  # queries of a block


class Hop(NamedTuple):
    """Some keys of the device `distance` places before this one, negative for one behind it."""

    distance: int
    low: int
    high: int


# Forward: maximum and sum (b, K, t * G), and the sum of weighted values (b, K, t * G, H). Backward:
# gradients of queries, keys and values.
State = tuple[jax.Array, jax.Array, jax.Array]
Turn = Callable[[State, Held, Number], State]
# Takes a state, keys, and the place and the sizes of a block.
Step = Callable[[State, Seen, Place, Loop], State]


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
    device, own, length = *_sides(query, key, value, hidden, words, plan), key.shape[2]
    top = jnp.full(query.shape[:3], MASKED, wide(query))
    state: State = (top, jnp.zeros_like(top), jnp.zeros((*top.shape, value.shape[3]), top.dtype))
    step = partial(_add_block, device, plan)
    hops = near(plan, length, own.images is not None)
    if hops is None:

        def turn(state: State, part: Held, number: Number) -> State:
            return _when_seen(plan, device, own, part, number, step, state)

        state = _each(
            step,
            state,
            _own(device, own, plan),
            _own_blocks(plan, own.images is not None, length),
        )
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


def _backward(plan: Plan, residuals: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, hidden, words, output, logs = residuals
    device, own, length = *_sides(query, key, value, hidden, words, plan), key.shape[2]
    inner = jnp.sum(gradient.astype(logs.dtype) * output.astype(logs.dtype), axis=-1)
    step = partial(_add_slopes, device, plan, gradient, inner, logs)
    state: State = (
        jnp.zeros(query.shape, wide(query)),
        jnp.zeros(key.shape, wide(key)),
        jnp.zeros(value.shape, wide(value)),
    )
    hops = near(plan, length, own.images is not None)
    if hops is None:
        blocks = _own_blocks(plan, own.images is not None, length)
        state = _each(step, state, _own(device, own, plan), blocks)

        def turn(state: State, part: Held, number: Number) -> State:
            for_query, for_key, for_value = state
            state = (for_query, *_sent((for_key, for_value), plan, 1))
            return _when_seen(plan, device, own, part, number, step, state)

        for_query, for_key, for_value = _ring(plan, own, state, turn)
        for_key, for_value = _sent((for_key, for_value), plan, 1)
    else:
        for_query, for_key, for_value = state
        for hop in hops:
            seen, blocks = _hop(plan, device, own, hop), hop_blocks(plan, hop, length)
            run = partial(_each, step, seen=seen, blocks=blocks)
            if hop.distance == 0:
                for_query, for_key, for_value = run((for_query, for_key, for_value))
                continue
            zeros = [jnp.zeros(x.shape, wide(x)) for x in (seen.held.key, seen.held.value)]
            state = (for_query, zeros[0], zeros[1])
            for_query, *of_keys = lax.cond(_there(plan, hop), run, lambda state: state, state)
            of_keys = [x.astype(query.dtype) for x in of_keys]
            of_keys = _sent(of_keys, plan, -hop.distance, wraps=False)
            for_key, for_value = (
                added(total, x.astype(total.dtype), hop.low)
                for total, x in zip((for_key, for_value), of_keys, strict=True)
            )
    return (*(x.astype(query.dtype) for x in (for_query, for_key, for_value)), None, None)


products = jax.custom_vjp(_products, nondiff_argnums=(5,))
products.defvjp(_forward, _backward)


def _sides(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    hidden: Any,
    words: jax.Array | None,
    plan: Plan,
) -> tuple[Own, Held]:
    mask, segments, images = hidden[:3]
    first = lax.axis_index(plan.axis) * key.shape[2]
    row = lax.axis_index(plan.rows) * query.shape[0] if plan.rows else 0
    own = Own(query, mask, segments, images, words, first, row)
    return own, Held(key, value, segments, images)


def _own(device: Own, own: Held, plan: Plan) -> Seen:
    return Seen(own, device.first, plan.causal or plan.window is not None)


def _hop(plan: Plan, device: Own, own: Held, hop: Hop) -> Seen:
    """Returns the keys of a hop, which their device sends at once."""
    cut = slice(hop.low, hop.high)
    part = Held(
        own.key[:, :, cut],
        own.value[:, :, cut],
        *(None if x is None else x[:, cut] for x in own[2:]),
    )
    if hop.distance:
        part = _sent(part, plan, hop.distance, wraps=False)
    origin = device.first - hop.distance * own.key.shape[2] + hop.low
    return Seen(part, origin, True)


def _when_seen(
    plan: Plan,
    device: Own,
    own: Held,
    part: Held,
    number: Number,
    step: Step,
    state: State,
) -> Any:
    """Runs all blocks with the keys that came over `number` places, if queries see any of them."""
    length, images = own.key.shape[2], own.images is not None
    index = lax.axis_index(plan.axis)
    origin = (index - number) % plan.parts * length
    ahead = not plan.causal or images
    checked = plan.window is not None or (plan.causal and images)
    blocks = _own_blocks(plan, True, length)  # all of these keys may be seen, or none
    run = partial(_each, step, seen=Seen(part, origin, checked), blocks=blocks)
    if ahead:
        return run(state)
    return lax.cond(number <= index, run, lambda state: state, state)


def _each(step: Step, state: State, seen: Seen, blocks: list[Block]) -> Any:
    """Repeats state = step(state, seen, place, sizes) over blocks."""
    for loop in loops(blocks):

        @jax.checkpoint
        def body(state: State, place: jax.Array, loop: Loop = loop) -> Any:
            return step(state, seen, place, loop), None

        state, _ = lax.scan(body, state, jnp.asarray(loop.places, "int32"))
    return state


def _add_block(
    device: Own, plan: Plan, state: State, seen: Seen, place: Place, size: Loop
) -> State:
    """Joins the keys of a block to the running softmax of its queries."""
    top, total, output = (rows_of(x, place, size, plan) for x in state)
    scores, _, allowed = scores_of(device, seen, place, size, plan)
    highest = jnp.maximum(top, jnp.max(merged(scores), axis=-1))
    decay = jnp.exp(top - highest)
    weights = _exponentials(scores, allowed, highest)
    total = total * decay + jnp.sum(weights, axis=-1)
    kept = kept_of(device, seen, place, size, plan)
    if kept is not None:
        weights = weights * kept
    values = keys_of(seen.held.value, place, size)
    product = dot(weights.astype(device.query.dtype), 3, values, 2) * plan.share
    new = (highest, total, output * decay[..., None] + product)
    return tuple(_put(x, part, place, plan) for x, part in zip(state, new, strict=True))  # type: ignore[return-value]


def _add_slopes(
    device: Own,
    plan: Plan,
    gradient: jax.Array,
    inner: jax.Array,
    logs: jax.Array,
    state: State,
    seen: Seen,
    place: Place,
    size: Loop,
) -> Any:
    """Adds the contributions of a block to the gradients of queries, keys and values."""
    for_query, *totals = state
    part, inner, logs = (rows_of(x, place, size, plan) for x in (gradient, inner, logs))
    scores, of_cap, allowed = scores_of(device, seen, place, size, plan)
    weights, kept = _exponentials(scores, allowed, logs), kept_of(device, seen, place, size, plan)
    block = (device, seen, place, size, plan)
    more, *of_keys = slopes(*block, part, weights, of_cap, kept, inner)
    own = rows_of(for_query, place, size, plan) + more
    sums = (added(x, y, place[1]) for x, y in zip(totals, of_keys, strict=True))
    return (_put(for_query, own, place, plan), *sums)


def _exponentials(scores: jax.Array, allowed: jax.Array | None, top: jax.Array) -> jax.Array:
    """Returns exp(scores - top) of the keys that are seen, (b, K, t * G, s)."""
    powers = jnp.exp(merged(scores) - top[..., None])
    if allowed is None:
        return powers
    return jnp.where(merged(jnp.broadcast_to(allowed, scores.shape)), powers, 0.0)


def _put(x: jax.Array, part: jax.Array, place: Place, plan: Plan) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, place[0] * plan.shared, 2)


def near(plan: Plan, length: int, ahead: bool) -> list[Hop] | None:
    """Returns the keys of other devices that a device needs, or None for all of them.

    With `ahead`, image blocks may let a query see later keys.
    """
    window = plan.window
    if window is None or ahead:
        return None
    reach = min(-(-(window - 1) // length), plan.parts - 1)
    hops = [Hop(i, max(i * length - window + 1, 0), length) for i in range(reach + 1)]
    if plan.causal:
        return hops
    if 2 * reach >= plan.parts:
        return None  # to both sides it would be more than the ring
    highs = [min(window + length - 1 - i * length, length) for i in range(1, reach + 1)]
    return [*hops, *(Hop(-i, 0, high) for i, high in enumerate(highs, start=1))]


def hop_blocks(plan: Plan, hop: Hop, length: int) -> list[Block]:
    """Returns the blocks of queries that see keys of a hop, with those keys."""
    blocks, window, gap = [], plan.window or 0, hop.distance * length
    for start in range(0, length, plan.size):
        stop = min(start + plan.size, length)
        low = max(gap + start - window + 1, hop.low)
        high = min(gap + stop - 1 + (1 if plan.causal else window), hop.high)
        if high > low:
            blocks.append(Block(start, low - hop.low, stop - start, high - low))
    return blocks


def _own_blocks(plan: Plan, ahead: bool, length: int) -> list[Block]:
    """Returns blocks of queries with the keys they see in the shard of one device."""
    return cuts(length, length, ahead or not plan.causal, plan.causal, None, plan.size)


def _there(plan: Plan, hop: Hop) -> jax.Array:
    """Returns True, as an array, if there is a device at this distance."""
    other = lax.axis_index(plan.axis) - hop.distance
    return (other >= 0) & (other < plan.parts)


def _sent(tree: Any, plan: Plan, places: int, wraps: bool = True) -> Any:
    """Returns the arrays of the device that is `places` before this one."""
    targets = [(i, i + places) for i in range(plan.parts)]
    if wraps:
        pairs = [(source, target % plan.parts) for source, target in targets]
    else:
        pairs = [(source, target) for source, target in targets if 0 <= target < plan.parts]
    return jax.tree.map(lambda x: lax.ppermute(x, plan.axis, pairs), tree)


def _ring(plan: Plan, own: Held, state: State, turn: Turn) -> Any:
    """Repeats state = turn(state, keys of another device, number) for all other devices.

    Keys are sent on before their turn is computed, so that both can go on at once.
    """
    carried_part = _sent(own, plan, 1)

    def body(carried: tuple[Any, Held], number: jax.Array) -> tuple[tuple[Any, Held], None]:
        state, part = carried
        following = _sent(part, plan, 1)
        return (turn(state, part, number), following), None

    if plan.parts > 2:
        numbers = jnp.arange(1, plan.parts - 1)
        (state, carried_part), _ = lax.scan(body, (state, carried_part), numbers)
    return turn(state, carried_part, plan.parts - 1)
