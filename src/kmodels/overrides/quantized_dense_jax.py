"""Products with kernels of 4 bits for JAX: numbers are chosen, not loaded one by one."""

from collections.abc import Sequence
from functools import partial

import jax

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.quantized_dense import TABLES, dequantize, product, quantized_dense, selected


def supports(call: OpCall) -> str | None:
    """Returns why the call goes to the generic body, or None."""
    return None if call.mode in TABLES else f"numbers of {call.mode} are in no table"


@override(quantized_dense, supports)
def quantized_dense_jax(
    x: jax.Array, arrays: Sequence[jax.Array], bias: jax.Array | None = None, mode: str = "int8"
) -> jax.Array:
    """Returns the product with a kernel that XLA makes in one loop."""
    return product(x, arrays, bias, mode, partial(dequantize, look_up=selected))
