"""Affine map of the last axis with a kernel of 8 or 4 bits."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops.dense import dense

# The 16 numbers of each mode with a table, by their codes.
# NF4: quantiles of the normal distribution (https://arxiv.org/abs/2305.14314, appendix E).
# FP4: a sign, two bits of exponent and one of fraction, divided by the largest as in bitsandbytes.
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(
        sign * np.float32(number / 192).item() + 0.0  # no negative zero
        for sign in (1, -1)
        for number in (0, 1, 128, 192, 64, 96, 32, 48)
    ),
}
# Scales of 8 bits that share a scale themselves.
NESTED_BLOCK = 256


def dynamic_numbers() -> np.ndarray:
    """Returns the 256 numbers of scales in 8 bits: bitsandbytes' signed dynamic data type.

    Each power of ten has twice as many as the one below (https://arxiv.org/abs/1511.04561); those
    at 0 and at the upper end have no counterpart.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        count = 2**power
        # Both halves of the ends are counted from their own side, as torch.linspace does.
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        below = np.float64(np.float32(0.1)) + step * np.arange(count + 1)
        above = 1.0 - step * np.arange(count, -1, -1)
        lower = np.arange(count + 1) < (count + 1) // 2
        ends = np.where(lower, below, above).astype("float32")
        middles = np.float32(10.0 ** (power - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return np.sort(np.array(numbers, "float32"))


DYNAMIC = dynamic_numbers()


@op
def quantized_dense(
    x: Tensor, arrays: Sequence[Tensor], bias: Tensor | None = None, mode: str = "int8"
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
        (1, 1).
        bias (out,) -> (..., out).
    Dtypes: x and bias floating, the compute dtype; scales float32, or as said.

    Args:
        x: the input.
        arrays: the parts of the kernel.
        bias: added to the result if given.
        mode: "int8", "int4", "nf4" or "fp4".

    Parity: `kmodels.ops.dense` with `dequantize(...)`.
    Source: https://arxiv.org/abs/2305.14314 (QLoRA)
    """
    return product(x, arrays, bias, mode, lambda _, *args, **kwargs: dequantize(*args, **kwargs))


def product(
    x: Tensor,
    arrays: Sequence[Tensor],
    bias: Tensor | None,
    mode: str,
    widen: Callable[..., Any],
) -> Any:
    """Returns the op's result.

    Args:
        x: as the op's.
        arrays: as the op's.
        bias: as the op's.
        mode: as the op's.
        widen: takes the tensor that the kernel is multiplied by, and the arguments of `dequantize`,
            which it does when that tensor is there: a compiler would widen all kernels at once.
    """
    arrays = [ops.convert_to_tensor(array) for array in arrays]
    width = x.shape[-1]

    @ops.custom_gradient
    def multiplied(x: Tensor, *arrays: Tensor) -> Any:
        dtype = keras.backend.standardize_dtype(x.dtype)

        def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor | None, ...]:
            upstream = args[0] if upstream is None else upstream
            kernel = widen(upstream, arrays, mode, rows=width, dtype=dtype)
            return dense(upstream, ops.transpose(kernel)), *[None] * len(arrays)

        return dense(x, widen(x, arrays, mode, rows=width, dtype=dtype)), gradient

    y = multiplied(x, *arrays)
    return y if bias is None else ops.add(y, bias)


def dequantize(arrays: Sequence[Tensor], mode: str, *, rows: int, dtype: str) -> Any:
    """Returns the kernel (rows, out) that the arrays of a mode stand for, in `dtype`."""
    numbers, scale, *more = arrays
    if mode == "int8":
        return ops.cast(ops.divide(ops.cast(numbers, "float32"), scale), dtype)
    if mode == "int4":
        kernel = ops.cast(keras.quantizers.unpack_int4(numbers, rows, axis=0), "float32")
        zero = ops.expand_dims(ops.cast(more[0], "float32"), 1)
        return ops.cast(_scaled(kernel, scale, zero), dtype)
    codes = ops.cast(numbers, "int32")
    halves = ops.stack([ops.right_shift(codes, 4), ops.bitwise_and(codes, 15)], axis=1)
    kernel = ops.take(np.array(TABLES[mode], "float32"), halves, axis=0)
    kernel = ops.reshape(kernel, (-1, numbers.shape[1]))[:rows]
    return ops.cast(_scaled(kernel, widened_scale(scale, *more) if more else scale), dtype)


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
    # bitsandbytes counts the scales by output, and then by group.
    places = np.arange(units) * groups + np.arange(groups)[:, None]
    own = ops.take(ops.reshape(nested, (-1,)), (places // NESTED_BLOCK).astype("int32"), axis=0)
    numbers = ops.take(DYNAMIC, ops.cast(scale, "int32"), axis=0)
    return ops.add(ops.multiply(numbers, own), offset)
