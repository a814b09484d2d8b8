"""The exact GELU for JAX: float32 between its narrow ends, and nothing kept but its input."""

import math

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, Tensor, override
from kmodels.ops.gelu import gelu


def supports(call: OpCall) -> str | None:
    """Returns the form with the error function."""
    return "the approximations are left to XLA" if call.approximate else None


@override(gelu, supports)
def gelu_jax(x: Tensor, *, approximate: bool | str = False) -> Tensor:
    """XLA on a CPU rounds after each step of bfloat16, and autodiff keeps those steps."""
    return _gelu(jnp.asarray(x))


def _exact(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide * _share(wide)).astype(x.dtype)


_gelu = jax.custom_vjp(_exact)


def _share(x: Tensor) -> Tensor:
    """Returns the normal distribution function."""
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _wide(x: Tensor) -> Tensor:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    return _exact(x), x


def _backward(kept: Tensor, gradient: Tensor) -> tuple[Tensor]:
    x = _wide(kept)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return (((_share(x) + x * density) * _wide(gradient)).astype(kept.dtype),)


_gelu.defvjp(_forward, _backward)
