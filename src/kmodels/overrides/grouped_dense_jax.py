"""Grouped products for JAX: its own on an accelerator, and a loop over blocks of rows on CPU."""

from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.grouped_dense import check_grouped, group_of, grouped_dense

Kept = tuple[jax.Array, jax.Array, jax.Array]


def supports(call: OpCall) -> str | None:
    """Supports accelerators, and float32 on CPU, without a mesh."""
    if keras.distribution.distribution() is not None:
        return "the rows or kernels of a mesh lie on several devices"
    if jax.default_backend() == "cpu" and jnp.dtype(call.x.dtype).itemsize < 4:
        return "in half precision the op's own body is faster on CPU"
    return None


@override(grouped_dense, supports)
def grouped_dense_jax(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot`; on CPU a loop, since that multiplies all rows by all kernels."""
    x, kernel, sizes = jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(sizes)
    check_grouped(x, kernel)
    if jax.default_backend() == "cpu":
        return _by_blocks(x, kernel, sizes)
    return lax.ragged_dot(x, kernel, sizes)


def _blocks(rows: int, groups: int, sizes: jax.Array) -> tuple[int, Kept]:
    """Returns the length of blocks; of each its group, first row and number of rows."""
    length = max(1, -(-rows // groups))
    numbers = jnp.arange((rows + groups * (length - 1)) // length, dtype="int32")
    blocks = (sizes + (length - 1)) // length
    group = group_of(numbers, blocks)
    place = (numbers - (jnp.cumsum(blocks) - blocks)[group]) * length
    start = (jnp.cumsum(sizes) - sizes)[group] + place
    return length, (group, start, jnp.clip(sizes[group] - place, 0, length))


def _padded(x: jax.Array, length: int) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros((length, x.shape[1]), x.dtype)])


def _products(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes blocks in the order of their rows: each overwrites the padding of the one before."""
    rows = x.shape[0]
    length, blocks = _blocks(rows, kernel.shape[0], sizes)
    padded = _padded(x, length)

    def step(y: jax.Array, block: Any) -> tuple[jax.Array, None]:
        group, start, there = block

        def write(y: jax.Array) -> jax.Array:
            product = lax.dynamic_slice_in_dim(padded, start, length) @ kernel[group]
            return lax.dynamic_update_slice_in_dim(y, product, start, 0)

        return lax.cond(there > 0, write, lambda y: y, y), None

    y = jnp.zeros((rows + length, kernel.shape[2]), x.dtype)
    return lax.scan(step, y, blocks)[0][:rows]


_by_blocks = jax.custom_vjp(_products)


def _forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Kept]:
    return _products(x, kernel, sizes), (x, kernel, sizes)


def _backward(residuals: Kept, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Returns the gradients; that of a kernel is the sum over its blocks."""
    x, kernel, sizes = residuals
    length, blocks = _blocks(x.shape[0], kernel.shape[0], sizes)
    for_x = _products(gradient, jnp.swapaxes(kernel, 1, 2), sizes)
    x, gradient = _padded(x, length), _padded(gradient, length)

    def step(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        group, start, there = block
        slope = lax.dynamic_slice_in_dim(gradient, start, length)
        slope = jnp.where(jnp.arange(length)[:, None] < there, slope, 0)
        product = lax.dynamic_slice_in_dim(x, start, length).T @ slope
        return total.at[group].add(product), None

    return for_x, lax.scan(step, jnp.zeros_like(kernel), blocks)[0], None


_by_blocks.defvjp(_forward, _backward)
