"""Products with kernels of few bits for JAX: each kernel is widened when it is needed.

No kernel depends on the input, so XLA would widen those of all layers at the beginning of a step,
and on a CPU it keeps no barrier until it orders the operations.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kmodels.core.dispatch import override
from kmodels.ops.quantized_dense import dequantize, product, quantized_dense


@override(quantized_dense)
def quantized_dense_jax(
    x: jax.Array,
    arrays: Sequence[jax.Array],
    bias: jax.Array | None = None,
    mode: str = "int8",
    sizes: jax.Array | None = None,
) -> jax.Array:
    """Returns the product with a kernel that waits for the input."""
    return product(x, arrays, bias, mode, sizes, _widened)


def _widened(
    after: jax.Array, arrays: Sequence[jax.Array], mode: str, *, rows: int, dtype: str
) -> jax.Array:
    if jax.default_backend() != "cpu" or after.size == 0:
        _, *arrays = jax.lax.optimization_barrier((after, *arrays))
        return dequantize(arrays, mode, rows=rows, dtype=dtype)
    # Always true, which XLA does not know.
    first = after[(0,) * after.ndim]
    is_there = (first == first) | (first != first)
    *lead, _, units = arrays[0].shape
    return jax.lax.cond(
        is_there,
        lambda: dequantize(arrays, mode, rows=rows, dtype=dtype),
        lambda: jnp.zeros((*lead, rows, units), dtype),
    )
