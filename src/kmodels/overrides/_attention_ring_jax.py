"""Attention for JAX over tokens that lie in parts on several devices, a part of the keys at a time.

Each device keeps its queries, and a running maximum and sum join the softmax over the parts of the
keys that come by (Liu et al. 2023, arXiv:2310.01889). The way back computes weights again from the
log of their sums, and gradients of keys and values go round with them.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.ops._attention_blockwise import MASKED
from kmodels.overrides._attention_hops_jax import (
    Held,
    Hidden,
    Hop,
    Plan,
    State,
    hop_blocks,
    near,
    own_blocks,
    ring,
    sent,
    there,
)
from kmodels.overrides._attention_joined_jax import (
    Device,
    Seen,
    Step,
    add_block,
    add_slopes,
    each,
)
from kmodels.overrides._attention_loops_jax import wide


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
    own = Held(key, value, hidden.segments, hidden.images)
    device, length = _device(query, own, hidden, words, plan), key.shape[2]
    top = jnp.full(query.shape[:3], MASKED, wide(query))
    state: State = (top, jnp.zeros_like(top), jnp.zeros((*top.shape, value.shape[3]), top.dtype))
    step = partial(add_block, device, plan)
    hops = near(plan, length, hidden.images is not None)
    if hops is None:

        def turn(state: State, held: Held, number: jax.Array | int) -> State:
            return _when_seen(plan, device, own, held, number, step, state)

        state = each(
            step,
            state,
            _own(device, own, plan),
            own_blocks(plan, hidden.images is not None, length),
        )
        state = ring(plan, own, state, turn)
    else:
        for hop in hops:
            seen = _hop(plan, device, own, hop)
            blocks = hop_blocks(plan, hop, length)
            if hop.distance == 0:
                state = each(step, state, seen, blocks)
            else:
                run = partial(each, step, seen=seen, blocks=blocks)
                state = lax.cond(there(plan, hop), run, lambda state: state, state)
    top, total, output = state
    some = total > 0
    total = jnp.where(some, total, 1.0)
    output = (output / total[..., None]).astype(query.dtype)
    return output, (query, key, value, hidden, words, output, top + jnp.log(total))


def _backward(plan: Plan, kept: tuple, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, hidden, words, output, logs = kept
    own = Held(key, value, hidden.segments, hidden.images)
    device, length = _device(query, own, hidden, words, plan), key.shape[2]
    inner = jnp.sum(gradient.astype(logs.dtype) * output.astype(logs.dtype), axis=-1)
    step = partial(add_slopes, device, plan, gradient, inner, logs)
    state: State = (
        jnp.zeros(query.shape, wide(query)),
        jnp.zeros(key.shape, wide(key)),
        jnp.zeros(value.shape, wide(value)),
    )
    hops = near(plan, length, hidden.images is not None)
    if hops is None:
        blocks = own_blocks(plan, hidden.images is not None, length)
        state = each(step, state, _own(device, own, plan), blocks)

        def turn(state: State, held: Held, number: jax.Array | int) -> State:
            for_query, for_key, for_value = state
            state = (for_query, *sent((for_key, for_value), plan, 1))
            return _when_seen(plan, device, own, held, number, step, state)

        for_query, for_key, for_value = ring(plan, own, state, turn)
        for_key, for_value = sent((for_key, for_value), plan, 1)
    else:
        for_query, for_key, for_value = state
        for hop in hops:
            seen, blocks = _hop(plan, device, own, hop), hop_blocks(plan, hop, length)
            run = partial(each, step, seen=seen, blocks=blocks)
            if hop.distance == 0:
                for_query, for_key, for_value = run((for_query, for_key, for_value))
                continue
            zeros = [jnp.zeros(x.shape, wide(x)) for x in (seen.held.key, seen.held.value)]
            state = (for_query, zeros[0], zeros[1])
            for_query, *found = lax.cond(there(plan, hop), run, lambda state: state, state)
            found = [x.astype(query.dtype) for x in found]
            found = sent(found, plan, -hop.distance, wraps=False)
            for_key, for_value = (
                total.at[:, :, hop.low : hop.high].add(x.astype(total.dtype))
                for total, x in zip((for_key, for_value), found, strict=True)
            )
    return (*(x.astype(query.dtype) for x in (for_query, for_key, for_value)), None, None)


products = jax.custom_vjp(_products, nondiff_argnums=(5,))
products.defvjp(_forward, _backward)


def _device(
    query: jax.Array, own: Held, hidden: Hidden, words: jax.Array | None, plan: Plan
) -> Device:
    first = lax.axis_index(plan.axis) * own.key.shape[2]
    return Device(query, hidden, words, first)


def _own(device: Device, own: Held, plan: Plan) -> Seen:
    return Seen(own, device.first, plan.causal or plan.window is not None)


def _hop(plan: Plan, device: Device, own: Held, hop: Hop) -> Seen:
    """Returns the keys of a hop, which their device sends at once."""
    cut = slice(hop.low, hop.high)
    held = Held(
        own.key[:, :, cut],
        own.value[:, :, cut],
        *(None if x is None else x[:, cut] for x in own[2:]),
    )
    if hop.distance:
        held = sent(held, plan, hop.distance, wraps=False)
    origin = device.first - hop.distance * own.key.shape[2] + hop.low
    return Seen(held, origin, True)


def _when_seen(
    plan: Plan,
    device: Device,
    own: Held,
    held: Held,
    number: jax.Array | int,
    step: Step,
    state: State,
) -> Any:
    """Runs all blocks with the keys that came over `number` places, if queries see any of them."""
    length, images = own.key.shape[2], own.images is not None
    index = lax.axis_index(plan.axis)
    origin = (index - number) % plan.parts * length
    ahead = not plan.causal or images
    checked = plan.window is not None or (plan.causal and images)
    blocks = own_blocks(plan, True, length)  # all of these keys may be seen, or none
    run = partial(each, step, seen=Seen(held, origin, checked), blocks=blocks)
    if ahead:
        return run(state)
    return lax.cond(number <= index, run, lambda state: state, state)
