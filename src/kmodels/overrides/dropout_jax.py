"""Dropout for JAX on CPU: random numbers are hashes of the index of each element.

Threefry, JAX's generator, takes 20 rounds for two words: at rate 0.1 before a ViT's second dense
layer it takes six times as long as the layer. Two rounds of a 32-bit hash suffice for dropout, fuse
with the product, and are recomputed in the backward pass, so that no mask is kept.
"""

import math
from collections.abc import Sequence

import jax
import keras
from jax import lax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dropout import check_rate, dropout

WORD = 2.0**32


def supports(call: OpCall) -> str | None:
    """Supports seeded dropout on CPU."""
    if not isinstance(call.seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if jax.default_backend() != "cpu":
        return "only on CPU do random numbers take longer than the layer in front"
    return None


@override(dropout, supports)
def dropout_jax(
    x: jax.Array, rate: float, seed: keras.random.SeedGenerator | jax.Array
) -> jax.Array:
    """Drops each element with the rate, to 32 bits."""
    check_rate(rate)
    x = jnp.asarray(x)
    return _dropped(x, words(seed), rate) if rate else x


def _scaled(x: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
    share = jnp.asarray(1.0 / (1.0 - rate), jnp.promote_types(x.dtype, "float32"))
    place = lax.iota(jnp.uint32, math.prod(x.shape)).reshape(x.shape)
    return jnp.where(_kept_at(place, keys, rate), x * share, 0).astype(x.dtype)


_dropped = jax.custom_vjp(_scaled, nondiff_argnums=(2,))


def _forward(x: jax.Array, keys: jax.Array, rate: float) -> tuple[jax.Array, jax.Array]:
    return _scaled(x, keys, rate), keys


def _backward(rate: float, keys: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return _scaled(gradient, keys, rate), None


_dropped.defvjp(_forward, _backward)


def _kept_at(place: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
    bits = _mix(_mix(place + keys[0]) ^ keys[1])
    return bits >= jnp.uint32(min(round(rate * WORD), int(WORD) - 1))


def kept_of(
    words: jax.Array,
    shape: Sequence[int],
    rate: float,
    first: Sequence[jax.Array | int],
    size: Sequence[int],
) -> jax.Array:
    """Returns the dropout mask of a part of an array: bool, True for elements that stay.

    The part of this size begins at the index `first` of the array, whose shape is given.
    """
    place = jnp.zeros((), jnp.uint32)
    for axis, (extent, start, count) in enumerate(zip(shape, first, size, strict=True)):
        along = jnp.arange(count, dtype=jnp.uint32) + jnp.asarray(start).astype(jnp.uint32)
        along = along.reshape([count if i == axis else 1 for i in range(len(shape))])
        place = place * jnp.uint32(extent) + along
    return _kept_at(place, words, rate)


def words(seed: keras.random.SeedGenerator | jax.Array) -> jax.Array:
    """Returns two words, from seed and call number, that key the dropout of one call."""
    words = jnp.asarray(seed.next()).astype("uint32")  # type: ignore[union-attr]
    first = _mix(words[0] ^ _mix(words[1] + jnp.uint32(0x9E3779B9)))
    return jnp.stack([first, _mix(first + jnp.uint32(0x85EBCA6B) + words[0])])


def _mix(x: jax.Array) -> jax.Array:
    """Returns a bijection of 32-bit words that changes half of the bits for each that changes.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018), the function lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
