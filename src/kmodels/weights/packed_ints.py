"""Linear weights in 4 bits of GPTQ and AWQ, which are read as floats or kept as they are.

"x.qweight" holds eight numbers in an int32, of eight inputs in GPTQ and of eight outputs in AWQ;
"x.qzeros" holds the number that stands for zero, of eight outputs in both, and "x.scales" the size
of a step, for each group of inputs and each output. With GPTQ, "x.g_idx" may say the group of
each input.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.schema import read_json
from kmodels.weights.packed import PackedArray
from kmodels.weights.tensors import LazyArray

log = logging.getLogger("kmodels")
WEIGHT, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
# Four bits of an int32 from its lowest on, as outputs in AWQ.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SMALLEST_GROUP = 32


def grouped(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the tensors of a directory, those of GPTQ or AWQ with their parts in one.

    Args:
        path: of the file or directory.
        tensors: all tensors by name.

    Raises:
        InputError: for parts that do not fit together, or a directory that does not say what they
            are.
    """
    names = [name.removesuffix(f".{WEIGHT}") for name in tensors if name.endswith(f".{WEIGHT}")]
    if not names:
        return dict(tensors)
    file = path / "config.json"
    described = read_json(file).get("quantization_config") if file.is_file() else None
    described = described if isinstance(described, dict) else {}
    if (method := described.get("quant_method")) not in ("gptq", "awq"):
        raise InputError(
            f"{path} holds {names[0]}.{WEIGHT}, and no config.json with a quantization_config of "
            "gptq or awq; give the whole directory"
        )
    parts = {f"{name}.{part}" for name in names for part in (WEIGHT, ZEROS, SCALES, GROUPS)}
    left = {name: tensor for name, tensor in tensors.items() if name not in parts}
    # The first format of GPTQ stores one less.
    more = int(method == "gptq" and described.get("checkpoint_format") != "gptq_v2")
    for name in names:
        left[f"{name}.weight"] = _joined(f"{path}: {name}", name, tensors, method == "awq", more)
    return left


def _joined(
    where: str, name: str, tensors: Mapping[str, LazyArray], is_awq: bool, more: int
) -> LazyArray:
    found = {part: tensors.get(f"{name}.{part}") for part in (WEIGHT, ZEROS, SCALES, GROUPS)}
    if lost := [part for part in (WEIGHT, ZEROS, SCALES) if found[part] is None]:
        raise InputError(f"{where} has no {lost[0]}; copy the file again")
    held: dict[str, Any] = {part: tensor for part, tensor in found.items() if tensor is not None}
    if any(len(held[part].shape) != 2 for part in (WEIGHT, ZEROS, SCALES)):
        raise InputError(f"{where} has parts that are no matrices; copy the file again")
    kinds = {WEIGHT: "i", ZEROS: "i", GROUPS: "i", SCALES: "fV"}  # V: bfloat16
    for part, tensor in held.items():
        is_int32 = tensor.dtype.itemsize == 4 or part in (SCALES, GROUPS)
        if tensor.dtype.kind not in kinds[part] or not is_int32:
            raise InputError(f"{where} has {part} of dtype {tensor.dtype}; copy the file again")
    groups, out = held[SCALES].shape
    rows = held[WEIGHT].shape[0]
    width = rows if is_awq else rows * 8
    shapes = {
        WEIGHT: (width, out // 8) if is_awq else (width // 8, out),
        ZEROS: (groups, out // 8),
    }
    wrong = [part for part, shape in shapes.items() if held[part].shape != shape]
    if wrong or out % 8 or groups < 1 or width % groups or (GROUPS in held and is_awq):
        raise InputError(
            f"{where} has a {(wrong or [SCALES])[0]} of another size than 4 bits have; directories "
            "with another number of bits are not read"
        )
    group = width // groups

    def codes() -> np.ndarray:
        values = _numbers(held[WEIGHT].read())
        if is_awq:
            return _outputs(values, ORDER)
        return values.swapaxes(1, 2).reshape(width, out)

    def zeros() -> np.ndarray:
        values = _outputs(_numbers(held[ZEROS].read()), ORDER if is_awq else range(8))
        return (values + more) & 15

    def scales() -> np.ndarray:
        return np.asarray(held[SCALES].read(), "float32")

    index = np.arange(width) // group
    if GROUPS in held:
        index = np.asarray(held[GROUPS].read()).reshape(-1)
        if len(index) != width or index.min() < 0 or index.max() >= groups:
            raise InputError(f"{where} has a {GROUPS} of other groups; copy the file again")

    def floats() -> np.ndarray:
        steps = codes().astype("float32") - zeros().astype("float32")[index]
        return np.ascontiguousarray((steps * scales()[index]).T)

    shape, kind = (out, width), np.dtype("float32")
    in_order = np.array_equal(index, np.arange(width) // group)
    if not in_order or group < SMALLEST_GROUP or group % 2:
        why = f"groups of {group} inputs" if in_order else "inputs that are not in order"
        log.warning("%s: %s are kept by no layer, so it becomes floats", where, why)
        return LazyArray(shape, kind, floats)

    def packed() -> np.ndarray:
        signed = codes() ^ 8  # the lower four bits of the number less 8
        return (signed[::2] | signed[1::2] << 4).view("int8")

    def kept() -> dict[str, LazyArray]:
        by_group = (groups, out)
        return {
            "kernel_int4": LazyArray((width // 2, out), np.dtype("int8"), packed),
            "kernel_scale": LazyArray(by_group, kind, scales),
            "kernel_zero": LazyArray(
                by_group, np.dtype("int8"), lambda: zeros().astype("int8") - np.int8(8)
            ),
        }

    settings = {"mode": "int4", "block": group}
    return PackedArray(shape, kind, floats, quantization=settings, parts=kept)


def _numbers(values: np.ndarray) -> np.ndarray:
    """(..., n) int32 -> (..., n, 8) uint8, from the lowest bits on."""
    shifts = np.arange(0, 32, 4, dtype="uint32")
    return (np.ascontiguousarray(values).view("uint32")[..., None] >> shifts & 15).astype("uint8")


def _outputs(values: np.ndarray, order: Any) -> np.ndarray:
    """(..., n, 8) -> (..., 8 * n), where the numbers of eight belong to these outputs."""
    return values[..., np.argsort(order)].reshape(*values.shape[:-2], -1)
