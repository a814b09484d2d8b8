"""The kernel of a frozen linear layer in 8 or 4 bits.

"nf4" and "fp4" are those of bitsandbytes: the same codes and scales, in our layout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals, runtime
from kmodels.core.errors import InputError, check_whole
from kmodels.core.few_bits import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.core.types import Tensor
from kmodels.layers.placement import add_weight
from kmodels.ops.quantized_dense import dequantize, quantized_dense

# Modes of `quantize`, and those of kernels that are only read: FP8, and the types of GGUF files.
MADE, READ = ("int8", "int4", "nf4", "fp4"), ("fp8", "q8_0", "q4_0", "q4_k", "q6_k")
MODES = MADE + READ
# Rows of a kernel that share a scale, unless a block is given.
BLOCKS = {"int4": 128, "nf4": 64, "fp4": 64}
# Fewer are taken where a block does not divide the width, down to this.
SMALLEST_BLOCK = 32
# Numbers that are quantized at a time, so that no temporary array has the size of a large kernel.
PART = 2**22


@dataclass(frozen=True)
class Quantization:
    """Settings of a quantized kernel of a linear layer.

    Args:
        mode: "int8" with one scale per output; "int4" with one scale and zero point, "nf4" or "fp4"
            with one scale per block and output; "fp8" with the same, or a type of GGUF files, see
            `kmodels.ops.quantized_dense`.
        block: rows that share a scale; the mode's own if None: 128, or 64 for "nf4" and "fp4", or
            all rows for "fp8". Where it does not divide the width, the next smaller power of two
            from 32 that does takes its place, or else the width.
        double: whether the scales of "nf4" and "fp4" have 8 bits; True if None.

    Raises:
        InputError: for another mode, or settings that the mode does not have.
    """

    mode: str
    block: int | None = None
    double: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"quantization mode is {self.mode!r}; choose {', '.join(MADE)}")
        if self.block is not None:
            check_whole("block", self.block)
            has_blocks = self.mode in BLOCKS or self.mode == "fp8"
            if not has_blocks or self.block < SMALLEST_BLOCK or self.block % 2:
                raise InputError(
                    f"block is {self.block} for {self.mode!r}; give an even number from "
                    f"{SMALLEST_BLOCK} for {', '.join(BLOCKS)}, or leave it out"
                )
        if self.double and self.mode not in TABLES:
            raise InputError(
                f"double is True for {self.mode!r}, whose scales are float32; leave it out, or "
                f"choose {' or '.join(TABLES)}"
            )
        # Both spellings of the same are equal.
        if self.block == BLOCKS.get(self.mode):
            object.__setattr__(self, "block", None)
        if self.double == (self.mode in TABLES):
            object.__setattr__(self, "double", None)

    @classmethod
    def of(cls, config: object) -> "Quantization":
        """Returns the settings of a `to_config`, or of a mode.

        Raises:
            InputError: for anything else.
        """
        if isinstance(config, Quantization):
            return config
        if isinstance(config, dict) and config.keys() <= {"mode", "block", "double"}:
            return cls(**{"mode": None, **config})
        if isinstance(config, str):
            return cls(config)
        raise InputError(f"quantization is {config!r}; give a mode: {', '.join(MADE)}")

    @classmethod
    def of_keras(
        cls, mode: Any, config: Any, block: int | None = None, double: bool | None = None
    ) -> "Quantization":
        """Returns the settings of the arguments of Keras' `quantize`.

        The config is a `keras.quantizers.QuantizationConfig`, a mode, or None.

        Raises:
            InputError: for a config of another mode, or with settings that kernels here lack.
        """
        if config is None:
            return cls(mode, block, double)
        named: Any = config if isinstance(config, str) else getattr(config, "mode", None)
        if mode not in (None, named):
            raise InputError(f"mode is {mode!r} and config is for {named!r}; give one of the two")
        settings = cls(named, block, double)
        if isinstance(config, str):
            return settings
        values, defaults = config.get_config(), type(config)().get_config()
        size = values.pop("block_size", BLOCKS.get(named))
        for name, value in values.items():
            if value is not None and value != defaults[name]:
                raise InputError(
                    f"quantize does not support {name} of a config: a kernel is quantized in the "
                    f"way of its mode; leave it out"
                )
        if named in BLOCKS and size in (None, -1):
            raise InputError(f"block_size is {size}; give a number from {SMALLEST_BLOCK}")
        return replace(settings, block=block or size)

    def to_config(self) -> str | dict[str, Any]:
        """Returns the mode, or all settings as JSON values where it does not say them."""
        more = {"block": self.block, "double": self.double}
        more = {name: value for name, value in more.items() if value is not None}
        return {"mode": self.mode, **more} if more else self.mode

    @property
    def is_double(self) -> bool:
        """Whether scales have 8 bits."""
        return self.mode in TABLES if self.double is None else self.double

    @property
    def of_experts(self) -> "Quantization":
        """The same with scales in float32."""
        return replace(self, double=False) if self.mode in TABLES else self

    def groups(self, rows: int) -> int:
        """Returns the number of blocks of a kernel with so many rows."""
        if self.mode == "int8" or (self.mode == "fp8" and self.block is None):
            return 1
        size = self.block or BLOCKS[self.mode]
        sizes = [size, *(2**i for i in range(size.bit_length(), 0, -1) if 2**i < size)]
        sizes = [size for size in sizes if size >= SMALLEST_BLOCK and rows % size == 0]
        return rows // sizes[0] if sizes else 1

    def shapes(
        self, rows: int, units: int, count: int | None = None
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns name, shape and dtype of the variables that stand for a kernel (rows, units).

        Their order is that of the arrays of `kmodels.ops.quantized_dense`. With a count of experts,
        they have an axis of experts in front, and scales are float32.
        """
        if count is not None:
            shapes = self.of_experts.shapes(rows, units)
            return {name: ((count, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        numbers = f"kernel_{self.mode}"
        if self.mode in READ and self.mode != "fp8":
            return self._shapes_of_gguf(rows, units)
        groups = self.groups(rows)
        if self.mode == "fp8":
            return {numbers: ((rows, units), "uint8"), "kernel_scale": ((groups, units), "float32")}
        if self.mode == "int8":
            return {numbers: ((rows, units), "int8"), "kernel_scale": ((1, units), "float32")}
        pairs, scales = (-(-rows // 2), units), (groups, units)
        if self.mode == "int4":
            return {
                numbers: (pairs, "int8"),
                "kernel_scale": (scales, "float32"),
                "kernel_zero": (scales, "int8"),
            }
        if not self.is_double:
            return {numbers: (pairs, "uint8"), "kernel_scale": (scales, "float32")}
        return {
            numbers: (pairs, "uint8"),
            "kernel_scale": (scales, "uint8"),
            "kernel_nested_scale": ((-(-groups * units // NESTED_BLOCK), 1), "float32"),
            "kernel_offset": ((1, 1), "float32"),
        }

    def _shapes_of_gguf(self, rows: int, units: int) -> dict[str, tuple[tuple[int, ...], str]]:
        parts: dict[str, tuple[int, str]] = {
            "q8_0": {"": (1, "int8"), "scale": (32, "float16")},
            "q4_0": {"": (2, "uint8"), "scale": (32, "float16")},
            "q4_k": {
                **{"": (2, "uint8"), "scale": (32, "uint8"), "least": (32, "uint8")},
                **{"own_scale": (256, "float16"), "own_least": (256, "float16")},
            },
            "q6_k": {
                **{"": (2, "uint8"), "scale": (16, "int8"), "high": (4, "uint8")},
                "own_scale": (256, "float16"),
            },
        }[self.mode]
        return {
            f"kernel_{name or self.mode}": ((rows // share, units), kind)
            for name, (share, kind) in parts.items()
        }


@dataclass(frozen=True)
class QuantizedKernel:
    """Variables of a layer that stand for a kernel (in, out), or (experts, in, out).

    Args:
        settings: how they do.
        rows: width of the input.
        variables: in the order of `Quantization.shapes`.
    """

    settings: Quantization
    rows: int
    variables: list[Any]

    @property
    def mode(self) -> str:
        """The mode of the settings."""
        return self.settings.mode

    def dense(self, x: Tensor, bias: Tensor | None, sizes: Tensor | None = None) -> Any:
        """Returns x @ kernel + bias; with sizes see `kmodels.ops.grouped_dense`."""
        return quantized_dense(x, self.variables, bias, self.mode, sizes)

    def wide(self) -> Any:
        """Returns the kernel in float32."""
        arrays = [keras.ops.convert_to_tensor(x) for x in self.variables]
        return dequantize(arrays, self.mode, rows=self.rows, dtype="float32")


def make(layer: Any, settings: Quantization) -> QuantizedKernel:
    """Returns the variables of a quantized kernel of a linear layer, filled with zeros."""
    shapes = settings.shapes(layer.input_dim, layer.units, layer.groups)
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
            for name, (shape, dtype) in shapes.items()
        ]
    return QuantizedKernel(settings, layer.input_dim, made)


def fill(quantized: QuantizedKernel, kernel: np.ndarray) -> None:
    """Quantizes `kernel`, (in, out) or (experts, in, out), and assigns it to the variables."""
    settings = quantized.settings
    if kernel.ndim == 2:
        arrays = quantize_array(kernel, settings)
    else:
        experts = [
            [
                keras.ops.convert_to_numpy(array)
                for array in quantize_array(one, settings.of_experts)
            ]
            for one in kernel
        ]
        arrays = [np.stack(parts) for parts in zip(*experts, strict=True)]
    for variable, array in zip(quantized.variables, arrays, strict=True):
        variable.assign(array)


def quantize_array(kernel: np.ndarray, settings: Quantization) -> list[Any]:
    """Returns the arrays that stand for a kernel (in, out), in the order of the variables."""
    kernel = np.asarray(kernel, "float32")
    if settings.mode == "int8":
        return list(keras.quantizers.abs_max_quantize(kernel, axis=0, to_numpy=True))
    rows, units = kernel.shape
    groups = settings.groups(rows)
    if settings.mode == "int4":
        numbers, scale, zero = keras.quantizers.abs_max_quantize_grouped_with_zero_point(
            kernel, block_size=rows // groups, to_numpy=True
        )
        packed = keras.quantizers.pack_int4(keras.ops.cast(numbers, "int8"), axis=0)[0]
        return [packed, scale, keras.ops.cast(zero, "int8")]
    numbers = np.empty((-(-rows // 2), units), "uint8")
    scale = np.empty((groups, units), "float32")
    step = max(1, PART // rows)
    for start in range(0, units, step):
        part = slice(start, start + step)
        numbers[:, part], scale[:, part] = _by_table(kernel[:, part], groups, settings.mode)
    if not settings.is_double:
        return [numbers, scale]
    return [numbers, *in_eight_bits(scale, scale.mean(dtype="float64").astype("float32"))]


def _by_table(kernel: np.ndarray, groups: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers and scales of "nf4" or "fp4", as bitsandbytes rounds them."""
    rows, units = kernel.shape
    blocks = kernel.reshape(groups, rows // groups, units)
    scale = np.abs(blocks).max(1)
    blocks = blocks * (np.float32(1) / np.maximum(scale, np.float32(1e-38)))[:, None]
    table = np.array(TABLES[mode], "float32")
    order = np.argsort(table, stable=True)
    ends = (table[order][:-1] + table[order][1:]) / np.float32(2)
    codes = order.astype("uint8")[np.searchsorted(ends, np.clip(blocks, -1, 1).reshape(-1))]
    codes = codes.reshape(rows, units)
    if rows % 2:
        zero = TABLES[mode].index(0.0)
        codes = np.concatenate([codes, np.full((1, units), zero, "uint8")])
    return codes[::2] << 4 | codes[1::2], scale


def in_eight_bits(scale: np.ndarray, offset: np.floating) -> list[np.ndarray]:
    """Returns scales (groups, out) less the offset in 8 bits, the scales of these, and the offset.

    Like bitsandbytes on a CPU, which looks up the code of one of 65,536 numbers in [-1, 1]; those
    on a GPU take the nearest code, another one for a number in a thousand.
    """
    # bitsandbytes counts the scales by output, and then by group.
    values = (scale.T - offset).reshape(-1)
    padded = np.zeros(-(-values.size // NESTED_BLOCK) * NESTED_BLOCK, "float32")
    padded[: values.size] = values
    blocks = padded.reshape(-1, NESTED_BLOCK)
    nested = np.abs(blocks).max(1)
    blocks = np.clip(blocks / np.maximum(nested, np.float32(1e-38))[:, None], -1, 1)
    half = np.float32(32767.5)
    places = np.floor((blocks + np.float32(1)) * half + np.float32(0.5)).astype("int32")
    ends = (DYNAMIC[:-1] + DYNAMIC[1:]) / np.float32(2)
    codes = np.searchsorted(ends, np.arange(65536, dtype="float32") / half - np.float32(1))
    codes = codes.astype("uint8")[np.minimum(places, 65535)] * (nested > 0)[:, None]
    codes = codes.reshape(-1)[: values.size].reshape(scale.shape[::-1]).T
    return [np.ascontiguousarray(codes), nested[:, None], np.full((1, 1), offset)]


def quantize(model: keras.Model, settings: Quantization, filters: Any = None) -> None:
    """Replaces the kernels of the linear layers of a built model that pass Keras' `filters`.

    These are a regular expression for names of layers, several of them, or a function of a layer;
    None for all layers.

    Raises:
        InputError: for a mode that is read from files alone, filters that no layer passes, or
            layers that cannot be quantized; the model is then unchanged.
    """
    if settings.mode in READ:
        raise InputError(
            f"quantization mode is {settings.mode!r}, which is only read from files; choose "
            f"{', '.join(MADE)}"
        )
    layers = [x for x in keras_internals.sublayers(model) if hasattr(x, "quantize_kernel")]
    chosen = [layer for layer in layers if _passes(filters, layer)]
    if layers and not chosen:
        names = ", ".join(sorted({layer.name for layer in layers}))
        raise InputError(f"filters is {filters!r}, which no linear layer passes; they are {names}")
    for layer in chosen:
        layer.check_float_kernel()
    for layer in chosen:
        layer.quantize_kernel(settings)
    # The kernels, and what quantizing them took, would stay with the process.
    runtime.malloc_trim()


def _passes(filters: Any, layer: keras.Layer) -> bool:
    if filters is None:
        return True
    if callable(filters):
        return bool(filters(layer))
    try:
        return any(
            re.search(x, layer.name) for x in ([filters] if isinstance(filters, str) else filters)
        )
    except (TypeError, re.error) as error:
        raise InputError(
            f"filters is {filters!r} ({error}); give a regular expression for names of layers, "
            "several of them, or a function of a layer"
        ) from None


def to_floats(model: keras.Model, kernels: Mapping[str, Any] | None = None) -> None:
    """Replaces the quantized kernels of a model by these by path, or by what they stand for."""
    for layer in keras_internals.sublayers(model):
        if hasattr(layer, "to_floats") and layer.quantized is not None:
            layer.to_floats(None if kernels is None else kernels[layer.path])
    runtime.malloc_trim()
