"""Affine map in bfloat16 for JAX on CPU, whose products have float32 results."""

import math

import jax
import keras
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dense import check_width, dense
from kmodels.overrides import meshes


def supports(call: OpCall) -> str | None:
    """Supports bfloat16 on CPU, without model parallelism."""
    if jax.default_backend() != "cpu":
        return "only on CPU are bfloat16 results slow"
    if any(keras.backend.standardize_dtype(x.dtype) != "bfloat16" for x in (call.x, call.kernel)):
        return "only products in bfloat16 are slow"
    if meshes.layers_are_cut() or meshes.tokens():
        return "tensors may be sharded by tokens or channels"
    return None


@override(dense, supports)
def dense_jax(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """XLA's bfloat16 products on a CPU take a slow path unless their results are float32."""
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    check_width(x, kernel)
    y = _single(x, kernel) if math.prod(x.shape[:-1]) == 1 else _product(x, kernel)
    return y if bias is None else y + jnp.asarray(bias)


def _single(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes one row, as in generation: a product would make XLA widen the kernel."""
    y = jnp.sum(x.reshape(-1, 1).astype("float32") * kernel.astype("float32"), axis=0)
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)


def _narrow_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _wide(x, (x.ndim - 1,), kernel, (0,)).astype(x.dtype)


_product = jax.custom_vjp(_narrow_product)


def _wide(
    a: jax.Array, a_axes: tuple[int, ...], b: jax.Array, b_axes: tuple[int, ...]
) -> jax.Array:
    # Named axes, for a transposed operand would be copied first.
    axes = ((a_axes, b_axes), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type="float32")


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _narrow_product(x, kernel), (x, kernel)


def _backward(
    residuals: tuple[jax.Array, jax.Array], upstream: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    for_x = _wide(upstream, (upstream.ndim - 1,), kernel, (1,))
    # A compiled step that does not need the kernel's gradient does not compute it.
    outer = tuple(range(x.ndim - 1))
    return for_x.astype(x.dtype), _wide(x, outer, upstream, outer).astype(x.dtype)


_product.defvjp(_forward, _backward)
