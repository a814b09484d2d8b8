"""GELU and its gate for JAX: computed in float32, rounded once, and only the inputs are kept.

XLA on a CPU rounds after each step of bfloat16, and autodiff keeps those steps.
"""

import math

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.activations import gated_gelu, gelu

CUBE = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def _exact_only(call: OpCall) -> str | None:
    return "the approximations are left to XLA" if call.approximate else None


@override(gelu, _exact_only)
def gelu_jax(x: jax.Array, *, approximate: bool | str = False) -> jax.Array:
    """GELU by the error function."""
    return _gelu(jnp.asarray(x))


def _exact(x: jax.Array) -> jax.Array:
    wide = _wide(x)
    return (wide * _normal(wide)).astype(x.dtype)


_gelu = jax.custom_vjp(_exact)


def _normal(x: jax.Array) -> jax.Array:
    """Returns the distribution function of the standard normal distribution."""
    return 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _exact(x), x


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide = _wide(x)
    density = jnp.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
    return (((_normal(wide) + wide * density) * _wide(gradient)).astype(x.dtype),)


_gelu.defvjp(_gelu_forward, _gelu_backward)


def _half_precision_only(call: OpCall) -> str | None:
    narrow = jnp.dtype(call.gate.dtype).itemsize < 4
    return None if narrow else "in float32 XLA's own fusion is as fast"


@override(gated_gelu, _half_precision_only)
def gated_gelu_jax(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Rounds once; the op's own body also rounds GELU.

    0.5 (1 + tanh(u)) is computed as the sigmoid of 2 u, which needs one exponential.
    """
    return _gated(jnp.asarray(gate), jnp.asarray(up))


def _product(gate: jax.Array, up: jax.Array) -> jax.Array:
    x, y = _wide(gate), _wide(up)
    return (x * _sigmoid(x) * y).astype(gate.dtype)


_gated = jax.custom_vjp(_product)


def _sigmoid(x: jax.Array) -> jax.Array:
    """Returns 0.5 (1 + tanh(u)) of GELU's tanh form."""
    return jax.nn.sigmoid(SLOPE * (x + CUBE * x * x * x))


def _gated_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(gate, up), (gate, up)


def _gated_backward(
    inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y, slope = (_wide(value) for value in (*inputs, gradient))
    share = _sigmoid(x)
    inner = SLOPE * (1.0 + 3.0 * CUBE * x * x)
    for_gate = slope * y * share * (1.0 + x * (1.0 - share) * inner)
    return for_gate.astype(inputs[0].dtype), (slope * x * share).astype(inputs[1].dtype)


_gated.defvjp(_gated_forward, _gated_backward)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
