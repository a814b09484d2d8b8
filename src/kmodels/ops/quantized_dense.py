"""Affine map of the last axis with a kernel of 8 or 4 bits."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.few_bits import DYNAMIC, FLOAT8, NESTED_BLOCK, TABLES
from kmodels.core.types import Tensor
from kmodels.ops.dense import dense
from kmodels.ops.grouped_dense import grouped_dense


@op
def quantized_dense(
    x: Tensor,
    arrays: Sequence[Tensor],
    bias: Tensor | None = None,
    mode: str = "int8",
    sizes: Tensor | None = None,
) -> Tensor:
    """`x @ dequantized(kernel) + bias`; the input has a gradient, the kernel has none.

    The backward pass dequantizes the kernel again, so that a step never holds more than one
    dequantized kernel.

    Shapes: x (..., in); arrays by mode, where groups divides in:
        "int8": numbers (in, out) int8 and scale (1, out), which the weights were multiplied by;
        "int4": numbers (in / 2 rounded up, out) int8, two rows in a byte as
        `keras.quantizers.pack_int4` packs, scale (groups, out), the size of a step, and zero
        (groups, out), the number that stands for zero;
        "nf4", "fp4": numbers (in / 2 rounded up, out) uint8, the first of two rows in the upper
        half of a byte, and scale (groups, out), the largest weight; or scale in uint8, nested
        (scales / 256 rounded up, 1), their own scales by output and then by group, and offset
        (1, 1);
        "fp8": numbers (in, out) uint8, the bits of float8_e4m3fn, and scale (groups, out);
        the types of GGUF files: "q8_0": numbers (in, out) int8 and scale (in / 32, out) float16;
        "q4_0": numbers (in / 2, out) uint8 as for "nf4", and scale (in / 32, out) float16;
        "q4_k": the same numbers, scale and least (in / 32, out) uint8, and their own scales
        (in / 256, out) float16 each; "q6_k": the same numbers, the lower 4 bits of 6, the upper 2
        of four rows in a byte (in / 4, out), scale (in / 16, out) int8, and its own scale
        (in / 256, out) float16.
        bias (out,) -> (..., out).
        With sizes (G,) each array has an axis of G kernels in front, and x (N, in) -> (N, out) is
        that of `grouped_dense`.
    Dtypes: x and bias floating, the compute dtype; scales float32, or as said.

    Args:
        x: the input.
        arrays: the parts of the kernel.
        bias: added to the result if given.
        mode: "int8", "int4", "nf4", "fp4", "fp8", "q8_0", "q4_0", "q4_k" or "q6_k".
        sizes: number of rows of each of G groups with a kernel of its own, see `grouped_dense`.

    Parity: `kmodels.ops.dense`, or `grouped_dense`, with `dequantize(...)`.
    Source: https://arxiv.org/abs/2305.14314 (QLoRA)
    """
    return product(
        x, arrays, bias, mode, sizes, lambda _, *args, **kwargs: dequantize(*args, **kwargs)
    )


def product(
    x: Tensor,
    arrays: Sequence[Tensor],
    bias: Tensor | None,
    mode: str,
    sizes: Tensor | None,
    widen: Callable[..., Any],
) -> Any:
    """Returns the op's result.

    `widen` takes the tensor that the kernel is multiplied by, and the arguments of `dequantize`,
    which it does when that tensor is there: a compiler would widen all kernels at once.
    """
    arrays = [ops.convert_to_tensor(array) for array in arrays]
    width, grouped = x.shape[-1], [] if sizes is None else [ops.convert_to_tensor(sizes, "int32")]

    @ops.custom_gradient
    def multiplied(x: Tensor, *arrays: Tensor) -> Any:
        dtype, count = keras.backend.standardize_dtype(x.dtype), len(arrays)
        arrays, sizes = arrays[: count - len(grouped)], arrays[count - len(grouped) :]
        times = grouped_dense if sizes else dense

        def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor | None, ...]:
            upstream = args[0] if upstream is None else upstream
            kernel = widen(upstream, arrays, mode, rows=width, dtype=dtype)
            return times(upstream, ops.swapaxes(kernel, -1, -2), *sizes), *[None] * count

        return times(x, widen(x, arrays, mode, rows=width, dtype=dtype), *sizes), gradient

    y = multiplied(x, *arrays, *grouped)
    return y if bias is None else ops.add(y, bias)


def dequantize(arrays: Sequence[Tensor], mode: str, *, rows: int, dtype: str) -> Any:
    """Returns the kernel (rows, out) that the arrays of a mode stand for, in `dtype`.

    With an axis of kernels in front of each array, there is one in front of the result.
    """
    if len(arrays[0].shape) == 3:
        count, pairs, units = arrays[0].shape
        # Two rows in a byte: those of an odd number end in one that is filled up.
        even = rows + rows % 2 if pairs < rows else rows
        flat = [ops.reshape(array, (-1, array.shape[-1])) for array in arrays]
        kernel = dequantize(flat, mode, rows=count * even, dtype=dtype)
        return ops.reshape(kernel, (count, even, units))[:, :rows]
    numbers, scale, *more = arrays
    if mode == "int8":
        parts = ops.reshape(ops.cast(numbers, "float32"), (scale.shape[0], -1, scale.shape[1]))
        kernel = ops.divide(parts, ops.expand_dims(scale, 1))
        return ops.cast(ops.reshape(kernel, numbers.shape), dtype)
    if mode == "int4":
        kernel = ops.cast(keras.quantizers.unpack_int4(numbers, rows, axis=0), "float32")
        zero = ops.expand_dims(ops.cast(more[0], "float32"), 1)
        return ops.cast(_scaled(kernel, scale, zero), dtype)
    if mode in TABLES:
        kernel = ops.take(np.array(TABLES[mode], "float32"), _unpacked(numbers, 4), axis=0)[:rows]
        return ops.cast(_scaled(kernel, widened_scale(scale, *more) if more else scale), dtype)
    if mode == "fp8":
        kernel = ops.take(FLOAT8, ops.cast(numbers, "int32"), axis=0)
        return ops.cast(_scaled(kernel, scale), dtype)
    return ops.cast(_of_gguf(numbers, scale, more, mode), dtype)


def _unpacked(numbers: Tensor, bits: int) -> Any:
    """Returns the codes of several rows in a byte, the first in its upper bits, as int32."""
    codes, mask = ops.cast(numbers, "int32"), 2**bits - 1
    parts = [
        ops.bitwise_and(ops.right_shift(codes, shift), mask) for shift in range(8 - bits, -1, -bits)
    ]
    return ops.reshape(ops.stack(parts, axis=1), (-1, numbers.shape[1]))


def _of_gguf(numbers: Tensor, scale: Tensor, more: Sequence[Tensor], mode: str) -> Any:
    """Returns the kernel in float32 of the numbers of a type of GGUF files."""
    if mode == "q8_0":
        return _scaled(ops.cast(numbers, "float32"), ops.cast(scale, "float32"))
    if mode == "q6_k":
        high, own = more
        codes = ops.add(_unpacked(numbers, 4), ops.multiply(_unpacked(high, 2), 16))
        return _scaled(ops.cast(ops.subtract(codes, 32), "float32"), _by_group(scale, own))
    codes = _unpacked(numbers, 4)
    if mode == "q4_0":
        codes = ops.cast(ops.subtract(codes, 8), "float32")
        return _scaled(codes, ops.cast(scale, "float32"))
    least, own, of_least = more
    kernel = _scaled(ops.cast(codes, "float32"), _by_group(scale, own))
    least = ops.repeat(_by_group(least, of_least), kernel.shape[0] // least.shape[0], axis=0)
    return ops.subtract(kernel, least)


def _by_group(scale: Tensor, own: Tensor) -> Any:
    """Returns scales times their own scales, in float32."""
    return _scaled(ops.cast(scale, "float32"), ops.cast(own, "float32"))


def _scaled(kernel: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Returns (kernel - zero) * scale for a kernel (rows, out) and others (groups, out)."""
    rows, units = kernel.shape
    kernel = ops.reshape(kernel, (scale.shape[0], rows // scale.shape[0], units))
    if zero is not None:
        kernel = ops.subtract(kernel, zero)
    return ops.reshape(ops.multiply(kernel, ops.expand_dims(scale, 1)), (rows, units))


def widened_scale(scale: Tensor, nested: Tensor, offset: Tensor) -> Tensor:
    """Returns scales (groups, out) in float32 of those in 8 bits, see `quantized_dense`."""
    groups, units = scale.shape
    # bitsandbytes counts the scales by output, and then by group. Indices would be constants of
    # the size of the scales in the program of each layer.
    own = ops.reshape(ops.broadcast_to(nested, (nested.shape[0], NESTED_BLOCK)), (-1,))
    own = ops.transpose(ops.reshape(own[: units * groups], (units, groups)))
    numbers = ops.take(DYNAMIC, ops.cast(scale, "int32"), axis=0)
    return ops.add(ops.multiply(numbers, own), offset)
