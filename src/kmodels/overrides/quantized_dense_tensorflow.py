"""Products with kernels of 4 bits for TensorFlow: XLA makes the kernel in one loop.

TensorFlow's own operations write and read arrays of four bytes a number, ten times as long.
"""

from collections.abc import Sequence

import tensorflow as tf

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.quantized_dense import TABLES, dequantize, product, quantized_dense, selected


def supports(call: OpCall) -> str | None:
    """Returns why the call goes to the generic body, or None."""
    return None if call.mode in TABLES else f"numbers of {call.mode} are in no table"


@override(quantized_dense, supports)
def quantized_dense_tensorflow(
    x: tf.Tensor, arrays: Sequence[tf.Tensor], bias: tf.Tensor | None = None, mode: str = "int8"
) -> tf.Tensor:
    """Returns the product with a kernel that is compiled by itself."""
    return product(x, arrays, bias, mode, _widened)


@tf.function(jit_compile=True)
def _widened(arrays: Sequence[tf.Tensor], mode: str, *, rows: int, dtype: str) -> tf.Tensor:
    return dequantize(arrays, mode, rows=rows, dtype=dtype, look_up=selected)
