"""Rotary embedding of places in a plane for JAX on CPU: as that of a row, by other angles."""

import jax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.rotary_embedding_2d import (
    check_rotary_embedding_2d,
    frequencies_2d,
    rotary_embedding_2d,
)
from kmodels.overrides import rotary_embedding_jax as row


def supports(call: OpCall) -> str | None:
    """Serves pairs of two halves on CPUs."""
    if call.pairs != "halves":
        return "only halves turn as those of a row do"
    return row.supports(call)


@override(rotary_embedding_2d, supports)
def rotary_embedding_2d_jax(
    x: jax.Array,
    coordinates: jax.Array,
    *,
    max_wavelength: float = 100.0,
    pairs: str = "halves",
) -> jax.Array:
    """Computes the op itself; its gradient is the inverse rotation, unlike autodiff's."""
    check_rotary_embedding_2d(x, coordinates, pairs)
    x = jnp.asarray(x)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = jnp.asarray(frequencies_2d(x.shape[-1], max_wavelength), dtype)
    angles = jnp.asarray(coordinates).astype(dtype)[..., None] * frequencies
    angles = angles.reshape(*angles.shape[:-2], x.shape[-1] // 2)  # (T, H/2) or (B, T, H/2)
    return row.rotation(x, row.stored(jnp.cos(angles)), row.stored(jnp.sin(angles)))
