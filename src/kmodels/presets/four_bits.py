"""Kernels in 4 bits of a directory of transformers, written as bitsandbytes saves them.

The tensors are those that `kmodels.weights.packed` reads, with the same codes and scales.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.layers.quantized import quantized_layers
from kmodels.ops.quantized_dense import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.weights import LazyArray, Rule, gather, transpose
from kmodels.weights.packed import STATE
from kmodels.weights.rules import bind_targets

# Block sizes of bitsandbytes.
BLOCKS = tuple(2**i for i in range(5, 13))


@dataclass(frozen=True)
class FourBits:
    """The quantized kernels of a model in a directory of transformers.

    Args:
        tensors: their tensors by name.
        variables: paths of the variables that these hold.
        kind: "nf4" or "fp4" of the first kernel; empty without quantized kernels.
        is_double: whether its scales have 8 bits.
    """

    tensors: dict[str, LazyArray] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    kind: str = ""
    is_double: bool = False

    def config(self, floats: Sequence[str], dtype: str) -> dict[str, Any]:
        """Returns what transformers' `BitsAndBytesConfig` writes to config.json.

        Args:
            floats: names of the matrices that are not packed.
            dtype: dtype of these, in which transformers computes.
        """
        # transformers packs every linear layer that is not listed; an output layer that is tied to
        # the embedding table has no tensor.
        skipped = {name.removesuffix(".weight") for name in floats if name.endswith(".weight")}
        return {
            "quant_method": "bitsandbytes",
            **{"load_in_4bit": True, "load_in_8bit": False},
            **{"_load_in_4bit": True, "_load_in_8bit": False},
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.is_double,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": sorted({*skipped, "lm_head"}),
            "llm_int8_threshold": 6.0,
        }


def collect(model: keras.Model, rules: Sequence[Rule], dtype: str) -> FourBits:
    """Returns the quantized kernels of a model as tensors of bitsandbytes.

    Args:
        model: a built model.
        rules: the table that would load the directory.
        dtype: dtype of the other weights.

    Raises:
        InputError: for a kernel that bitsandbytes has no counterpart for.
    """
    tensors: dict[str, LazyArray] = {}
    layers = list(quantized_layers(model).values())
    for layer in layers:
        (rule,) = bind_targets(rules, [f"{layer.path}/kernel"]) or [None]
        # A tensor that holds several kernels is a bare parameter in transformers.
        if rule is None or rule.transform is not transpose or "/" in rule.source:
            raise InputError(
                f"{layer.path} is quantized, and its weight in a directory of transformers is not "
                "that of a linear layer; call dequantize first"
            )
        tensors |= _tensors(layer, rule.source, dtype)
    if not layers:
        return FourBits()
    first = layers[0].quantized.settings
    variables = tuple(v.path for layer in layers for v in layer.quantized.variables)
    return FourBits(tensors, variables, first.mode, first.is_double)


def _tensors(layer: Any, name: str, dtype: str) -> dict[str, LazyArray]:
    kernel = layer.quantized
    mode, rows, units = kernel.mode, kernel.rows, layer.units
    if mode not in TABLES:
        raise InputError(
            f"{layer.path} is quantized to {mode}; a directory of transformers holds "
            f"{' and '.join(TABLES)}: call dequantize first, or quantize to one of these"
        )
    block = rows // kernel.settings.groups(rows)
    if block not in BLOCKS:
        raise InputError(
            f"{layer.path} has a scale for each {block} of its {rows} inputs; bitsandbytes has "
            f"blocks of {', '.join(map(str, BLOCKS))}: call dequantize first"
        )
    codes, scale, *more = kernel.variables
    groups = rows // block

    def flat(variable: Any, shape: tuple[int, ...], kind: str) -> LazyArray:
        """The numbers by output, and then by input."""
        return LazyArray(
            shape, np.dtype(kind), lambda: gather.values(variable).T.reshape(shape).astype(kind)
        )

    tensors = {
        "": flat(codes, (rows // 2 * units, 1), "uint8"),
        ".absmax": flat(scale, (groups * units,), "uint8" if more else "float32"),
        ".quant_map": _array(np.array(TABLES[mode], "float32")),
    }
    state = {"quant_type": mode, "blocksize": block, "dtype": dtype, "shape": [units, rows]}
    if more:
        nested, offset = more
        tensors[".nested_absmax"] = flat(nested, (nested.shape[0],), "float32")
        tensors[".nested_quant_map"] = _array(DYNAMIC)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = float(gather.values(offset)[0, 0])
    tensors[f"{STATE}{mode}"] = _array(np.frombuffer(json.dumps(state).encode(), "uint8"))
    return {f"{name}{end}": tensor for end, tensor in tensors.items()}


def _array(values: np.ndarray) -> LazyArray:
    return LazyArray(values.shape, values.dtype, lambda: values)
