"""Linear weights in FP8 of transformers and compressed-tensors, read as floats or kept as they are.

"x.weight" holds float8_e4m3fn, and "x.weight_scale_inv" (transformers) or "x.weight_scale"
(compressed-tensors) the factor of each block of outputs and inputs, of each output, or of all.
Scales of activations are left out.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json
from kmodels.weights.packed import PackedArray
from kmodels.weights.tensors import LazyArray

log = logging.getLogger("kmodels")
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
SCALES = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale")
SMALLEST_BLOCK = 32


def grouped(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the tensors of a directory, those in FP8 with their scales in one.

    Args:
        path: path of the file or directory.
        tensors: all tensors by name.

    Raises:
        InputError: for numbers in FP8 without scales that fit them.
    """
    names = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    if not names:
        return dict(tensors)
    left, blocks = dict(tensors), _blocks(path)
    for name in names:
        layer, _, kind = name.rpartition(".")
        found = [f"{layer}.{part}" for part in SCALES if f"{layer}.{part}" in tensors]
        if kind != "weight" or len(tensors[name].shape) != 2 or len(found) != 1:
            raise InputError(
                f"{path}: {name} is in FP8, and only weights of linear layers with a "
                f"{' or '.join(SCALES)} are read so; give the whole directory"
            )
        for part in (*SCALES, *OF_ACTIVATIONS):
            left.pop(f"{layer}.{part}", None)
        left[name] = _joined(f"{path}: {name}", tensors[name], tensors[found[0]], blocks)
    return left


def _blocks(path: Path) -> list[tuple[int, int]]:
    """Returns the sizes (outputs, inputs) of the blocks that a config.json announces."""
    file = path / "config.json"
    found = []
    description = read_json(file) if file.is_file() else {}
    for part in (description, description.get("text_config") or {}):
        described = part.get("quantization_config") or {}
        found.append(described.get("weight_block_size"))
        for group in (described.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            found.append(weights.get("block_structure"))
            found.append([1, weights.get("group_size") or 0])
    return [(out, width) for out, width in filter(None, found) if out > 0 and width > 0]


def _joined(
    where: str, numbers: LazyArray, scale: LazyArray, blocks: list[tuple[int, int]]
) -> LazyArray:
    out, width = numbers.shape
    if scale.dtype.kind not in "fV":  # V: bfloat16
        raise InputError(f"{where} has scales of dtype {scale.dtype}; copy it again")
    # The scales of each output, of all numbers, and of blocks.
    sizes = {(out, 1): (1, width), (out,): (1, width), (1, 1): (out, width), (1,): (out, width)}
    sizes |= {(-(-out // rows), -(-width // block)): (rows, block) for rows, block in blocks}
    sizes[()] = (out, width)
    if scale.shape not in sizes:
        raise InputError(
            f"{where} is {numbers.shape} and has scales {scale.shape}; with the blocks of "
            f"config.json they are {' or '.join(map(str, sizes))}"
        )
    rows, block = sizes[scale.shape]
    groups = -(-width // block)

    def scales() -> np.ndarray:
        """Scales (out, groups)."""
        values = np.asarray(scale.read()).astype("float32").reshape(-1, groups)
        return values.repeat(rows, 0)[:out]

    def floats() -> np.ndarray:
        return numbers.read().astype("float32") * scales().repeat(block, 1)[:, :width]

    shape, kind = (out, width), np.dtype("float32")
    if groups > 1 and (width % block or block < SMALLEST_BLOCK or block % 2):
        log.warning(
            "%s: blocks of %d inputs of %d are kept by no layer, so it becomes floats",
            *(where, block, width),
        )
        return LazyArray(shape, kind, floats)

    def kept() -> dict[str, LazyArray]:
        return {
            "kernel_fp8": LazyArray(
                (width, out), np.dtype("uint8"), lambda: _turned(numbers.read().view("uint8"))
            ),
            "kernel_scale": LazyArray((groups, out), kind, lambda: _turned(scales())),
        }

    settings: dict[str, Any] = {"mode": "fp8"} | ({"block": block} if groups > 1 else {})
    return PackedArray(shape, kind, floats, quantization=settings, parts=kept)


def _turned(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.T)
