"""The kernel of a frozen linear layer in 8 or 4 bits."""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers.placement import add_weight
from kmodels.ops.quantized_dense import dequantize

MODES = ("int8", "int4")
# Rows of a kernel that share a scale in 4 bits; the first that divides the width is taken.
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class QuantizedKernel:
    """Whole numbers that stand for a kernel (in, out); variables of the layer.

    Args:
        mode: "int8" with one scale per output, or "int4" with one per group of inputs and output.
        rows: width of the input.
        numbers: int8, see `kmodels.ops.quantized_dense`.
        scale: float32.
        zero: only for "int4".
    """

    mode: str
    rows: int
    numbers: Any
    scale: Any
    zero: Any = None

    @property
    def variables(self) -> list[Any]:
        """numbers, scale and, with "int4", zero."""
        return [self.numbers, self.scale, *([] if self.zero is None else [self.zero])]

    def dense(self, x: Tensor, bias: Tensor | None) -> Any:
        """Returns x @ kernel + bias."""
        return ops.quantized_dense(x, self.numbers, self.scale, self.zero, bias)

    def wide(self) -> Any:
        """Returns the kernel (in, out) in float32."""
        zero = [] if self.zero is None else [keras.ops.convert_to_tensor(self.zero)]
        arrays = [keras.ops.convert_to_tensor(x) for x in (self.numbers, self.scale)]
        return dequantize(*arrays, *zero, rows=self.rows, dtype="float32")


def check_mode(mode: object) -> str:
    """Returns the mode, or `InputError` with those there are."""
    if mode not in MODES:
        raise InputError(f"quantization mode is {mode!r}; choose {' or '.join(MODES)}")
    return mode


def shapes(mode: str, rows: int, units: int) -> dict[str, tuple[tuple[int, int], str]]:
    """Returns name, shape and dtype of the variables that stand for a kernel (rows, units)."""
    groups = rows // next((size for size in GROUPS if rows % size == 0), rows)
    four = mode == "int4"
    found = {
        f"kernel_{mode}": ((-(-rows // 2) if four else rows, units), "int8"),
        "kernel_scale": ((groups if four else 1, units), "float32"),
    }
    if four:
        found["kernel_zero"] = ((groups, units), "int8")
    return found


def make(layer: keras.Layer, mode: str, rows: int, units: int) -> QuantizedKernel:
    """Returns the variables of a quantized kernel, filled with zeros."""
    with keras_internals.changing(layer):
        made = [
            add_weight(
                layer,
                layer.shard_granularity,
                shape=shape,
                initializer="zeros",
                dtype=dtype,
                trainable=False,
                autocast=False,
                name=name,
            )
            for name, (shape, dtype) in shapes(mode, rows, units).items()
        ]
    return QuantizedKernel(mode, rows, *made)


def fill(quantized: QuantizedKernel, kernel: np.ndarray) -> None:
    """Sets the numbers to those nearest to `kernel` (in, out)."""
    kernel = np.asarray(kernel, "float32")
    if quantized.mode == "int8":
        numbers, scale = keras.quantizers.abs_max_quantize(kernel, axis=0, to_numpy=True)
    else:
        block = quantized.rows // quantized.scale.shape[0]
        numbers, scale, zero = keras.quantizers.abs_max_quantize_grouped_with_zero_point(
            kernel, block_size=block, to_numpy=True
        )
        quantized.zero.assign(keras.ops.cast(zero, "int8"))
        numbers = keras.quantizers.pack_int4(keras.ops.cast(numbers, "int8"), axis=0)[0]
    quantized.numbers.assign(numbers)
    quantized.scale.assign(scale)


def check_layers(model: keras.Model) -> None:
    """Raises `InputError` for a model with a layer whose kernel has no quantized form."""
    for layer in keras_internals.sublayers(model):
        if reason := getattr(layer, "not_quantized", None):
            raise InputError(f"{layer.path} {reason}; leave the model in half precision")


def quantize(model: keras.Model, mode: object) -> None:
    """Replaces the kernel of every linear layer of a model.

    Args:
        model: a built model.
        mode: "int8", one scale per output, or "int4", one per output and up to 128 inputs.

    Raises:
        InputError: for other modes, a quantized model, or one with adapters.
    """
    check_mode(mode)
    check_layers(model)
    for layer in keras_internals.sublayers(model):
        if hasattr(layer, "quantize_kernel"):
            layer.quantize_kernel(mode)


def describe(model: keras.Model) -> dict[str, str]:
    """Returns which layers of a model are quantized, and how: path to mode."""
    found = {}
    for layer in keras_internals.sublayers(model):
        quantized = getattr(layer, "quantized", None)
        if isinstance(quantized, QuantizedKernel):
            found[layer.path] = quantized.mode
    return found


def restore(model: keras.Model, description: dict[str, str], keeps_values: bool = False) -> None:
    """Gives the layers of `describe` quantized kernels.

    Args:
        model: a built model.
        description: path to mode.
        keeps_values: True to quantize the kernels that have values; else zeros wait for a file.
    """
    for layer in keras_internals.sublayers(model):
        if layer.path in description:
            mode = check_mode(description[layer.path])
            if keeps_values and keras_internals.has_value(layer.kernel):
                layer.quantize_kernel(mode)
            else:
                layer.to_quantized(mode)
