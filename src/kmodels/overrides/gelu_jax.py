"""The exact GELU for JAX: float32 between its narrow ends, and nothing kept but its input."""

import math

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.gelu import gelu


def supports(call: OpCall) -> str | None:
    """Returns the form with the error function."""
    return "the approximations are left to XLA" if call.approximate else None


@override(gelu, supports)
def gelu_jax(x: jax.Array, *, approximate: bool | str = False) -> jax.Array:
    """XLA on a CPU rounds after each step of bfloat16, and autodiff keeps those steps."""
    return _gelu(jnp.asarray(x))


def _exact(x: jax.Array) -> jax.Array:
    wide = _wide(x)
    return (wide * _share(wide)).astype(x.dtype)


_gelu = jax.custom_vjp(_exact)


def _share(x: jax.Array) -> jax.Array:
    """Returns the normal distribution function."""
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _exact(x), x


def _backward(kept: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    x = _wide(kept)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return (((_share(x) + x * density) * _wide(gradient)).astype(kept.dtype),)


_gelu.defvjp(_forward, _backward)
