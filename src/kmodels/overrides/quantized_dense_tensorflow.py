"""Products with kernels of few bits for TensorFlow: XLA widens each in one loop, when it is needed.

TensorFlow's own operations write and read arrays of four bytes a number, and no kernel depends on
the input: a graph would widen those of all layers at the beginning of a step.
"""

from collections.abc import Sequence

import tensorflow as tf

from kmodels.core.dispatch import override
from kmodels.ops.quantized_dense import dequantize, product, quantized_dense


@override(quantized_dense)
def quantized_dense_tensorflow(
    x: tf.Tensor,
    arrays: Sequence[tf.Tensor],
    bias: tf.Tensor | None = None,
    mode: str = "int8",
    sizes: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the product with a kernel that is compiled by itself and waits for the input."""
    return product(x, arrays, bias, mode, sizes, _widened)


def _widened(
    after: tf.Tensor, arrays: Sequence[tf.Tensor], mode: str, *, rows: int, dtype: str
) -> tf.Tensor:
    with tf.control_dependencies([after]):
        return _compiled(arrays, mode, rows=rows, dtype=dtype)


_compiled = tf.function(dequantize, jit_compile=True)
