"""Rotary position embedding for JAX on CPU; halves are joined after the cast to x's dtype."""

from collections.abc import Sequence

import jax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.rotary_embedding import (
    check_rotary_embedding,
    check_rotary_embedding_2d,
    frequencies_2d,
    rotary_embedding,
    rotary_embedding_2d,
    rotary_frequencies,
)


def supports(call: OpCall) -> str | None:
    """Supports CPUs; on accelerators XLA fuses the op's own body."""
    return None if jax.default_backend() == "cpu" else "only on CPU was it measured to be faster"


@override(rotary_embedding, supports)
def rotary_embedding_jax(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    max_wavelength: float = 10_000.0,
    scaling: float | Sequence[float] = 1.0,
    turned: float = 1.0,
) -> jax.Array:
    """Rotates; the gradient is the inverse rotation, unlike that of autodiff."""
    check_rotary_embedding(x)
    x = jnp.asarray(x)
    positions = jnp.arange(x.shape[1]) if positions is None else jnp.asarray(positions)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = rotary_frequencies(x.shape[-1], max_wavelength, scaling, turned).astype(dtype)
    angles = positions.astype(dtype)[..., None] * frequencies  # (T, H/2) or (B, T, H/2)
    return rotation(x, stored(jnp.cos(angles)), stored(jnp.sin(angles)))


def stored(table: jax.Array) -> jax.Array:
    """Returns the table with an axis for the heads, computed once.

    XLA on a CPU fuses a cosine into its uses, and recomputes it for each head and text, but not
    through a matrix product. One with the identity is exact, and cheaper than the cosines.
    """
    same = jnp.eye(table.shape[-1], dtype=table.dtype)
    return jnp.matmul(table, same, precision="highest")[..., None, :]


def _rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    parts = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate([part.astype(x.dtype) for part in parts], axis=-1)


@jax.custom_vjp
def rotation(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates x (B, T, N, H) by tables (T or B, T, 1, H / 2), which get no gradient."""
    return _rotate(x, cosine, sine)


def _forward(
    x: jax.Array, cosine: jax.Array, sine: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotate(x, cosine, sine), (cosine, sine)


def _backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    return _rotate(gradient, kept[0], -kept[1]), None, None


rotation.defvjp(_forward, _backward)


def _supports_2d(call: OpCall) -> str | None:
    if call.pairs != "halves":
        return "only halves turn as those of a row do"
    return supports(call)


@override(rotary_embedding_2d, _supports_2d)
def rotary_embedding_2d_jax(
    x: jax.Array,
    coordinates: jax.Array,
    *,
    max_wavelength: float = 100.0,
    pairs: str = "halves",
) -> jax.Array:
    """Rotates; the gradient is the inverse rotation, unlike that of autodiff."""
    check_rotary_embedding_2d(x, coordinates, pairs)
    x = jnp.asarray(x)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(frequencies_2d(x.shape[-1], max_wavelength), dtype)
    angles = jnp.asarray(coordinates).astype(dtype)[..., None] * frequencies
    angles = angles.reshape(*angles.shape[:-2], x.shape[-1] // 2)  # (T, H/2) or (B, T, H/2)
    return rotation(x, stored(jnp.cos(angles)), stored(jnp.sin(angles)))
