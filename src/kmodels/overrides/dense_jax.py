"""Affine map for JAX on CPU: one flat product, and for bfloat16 one with float32 results."""

import math

import jax
import keras
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dense import check_width, dense
from kmodels.overrides import meshes


def supports(call: OpCall) -> str | None:
    """Supports three or more axes, or bfloat16, on CPU, without model parallelism."""
    if jax.default_backend() != "cpu":
        return "only on CPU is a flat product faster"
    if len(call.x.shape) < 3 and not narrow(call.x, call.kernel):
        return "x is a matrix already"
    if meshes.layers_are_cut() or meshes.tokens():
        return "merging axes could gather a sharded tensor"
    return None


@override(dense, supports)
def dense_jax(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Merges the leading axes around the product; a sharded batch axis stays sharded.

    XLA's bfloat16 products on a CPU take a slow path unless their results are float32; those keep
    their axes, which takes less memory.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    check_width(x, kernel)
    if narrow(x, kernel):
        y = _single(x, kernel) if math.prod(x.shape[:-1]) == 1 else _product(x, kernel)
        return y if bias is None else y + jnp.asarray(bias)
    y = x.reshape(-1, x.shape[-1]) @ kernel
    y = y if bias is None else y + jnp.asarray(bias)
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def narrow(*arrays: jax.Array) -> bool:
    """Returns True if all arrays are bfloat16, whose products are computed in float32."""
    return all(keras.backend.standardize_dtype(a.dtype) == "bfloat16" for a in arrays)


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
    kept: tuple[jax.Array, jax.Array], upstream: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    for_x = _wide(upstream, (upstream.ndim - 1,), kernel, (1,))
    # A compiled step that does not need the kernel's gradient does not compute it.
    outer = tuple(range(x.ndim - 1))
    return for_x.astype(x.dtype), _wide(x, outer, upstream, outer).astype(x.dtype)


_product.defvjp(_forward, _backward)
