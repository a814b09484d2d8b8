"""Affine map of the last axis with a kernel of 8 or 4 bits."""

from typing import Any

import keras
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops.dense import dense


@op
def quantized_dense(
    x: Tensor,
    kernel: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x @ dequantized(kernel) + bias`; the input has a gradient, the kernel has none.

    The backward pass dequantizes the kernel again, so that a step never holds more than one
    dequantized kernel.

    Shapes: x (..., in); 8 bits: kernel (in, out), scale (1, out); 4 bits: kernel (in / 2 rounded
        up, out), scale and zero (groups, out), where groups divides in; bias (out,) -> (..., out).
    Dtypes: x and bias floating, the compute dtype; kernel int8; scale float32; zero any.

    Args:
        x: the input.
        kernel: whole numbers; of 4 bits two rows in a byte, as `keras.quantizers.pack_int4` packs.
        scale: 8 bits: factor that the weights were multiplied by; 4 bits: size of a step.
        zero: for 4 bits, the number that stands for zero.
        bias: added to the result if given.

    Parity: `kmodels.ops.dense` with `dequantize(...)`.
    Source: https://arxiv.org/abs/2305.14314 (QLoRA)
    """
    arrays = [ops.convert_to_tensor(a) for a in (kernel, scale, *([] if zero is None else [zero]))]
    width = x.shape[-1]

    @ops.custom_gradient
    def product(x: Tensor, *arrays: Tensor) -> Any:
        dtype = keras.backend.standardize_dtype(x.dtype)

        def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor | None, ...]:
            upstream = args[0] if upstream is None else upstream
            wide = dequantize(*arrays, rows=width, dtype=dtype)
            return dense(upstream, ops.transpose(wide)), *[None] * len(arrays)

        return dense(x, dequantize(*arrays, rows=width, dtype=dtype)), gradient

    y = product(x, *arrays)
    return y if bias is None else ops.add(y, bias)


def dequantize(
    kernel: Tensor, scale: Tensor, zero: Tensor | None = None, *, rows: int, dtype: str
) -> Tensor:
    """Returns the kernel (rows, out) that the numbers stand for, in `dtype`."""
    if zero is None:
        return ops.cast(ops.divide(ops.cast(kernel, "float32"), scale), dtype)
    groups = scale.shape[0]
    kernel = ops.cast(keras.quantizers.unpack_int4(kernel, rows, axis=0), "float32")
    kernel = ops.reshape(kernel, (groups, rows // groups, -1))
    zero = ops.expand_dims(ops.cast(zero, "float32"), 1)
    kernel = ops.multiply(ops.subtract(kernel, zero), ops.expand_dims(scale, 1))
    return ops.cast(ops.reshape(kernel, (rows, -1)), dtype)
