"""Tensors of 4 bits in files of bitsandbytes, which are read as floats or kept as they are.

Beside a tensor "x" lie "x.absmax", "x.quant_map" and "x.quant_state.bitsandbytes__nf4" (or fp4), a
JSON object as bytes; with scales in 8 bits "x.nested_absmax" and "x.nested_quant_map" too.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.schema import NUMBER, Needed, Shape, check_shape
from kmodels.ops.quantized_dense import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.weights.rules import Rule, SourceCheckpoint, Transform, bind_sources, transpose
from kmodels.weights.tensors import LazyArray

log = logging.getLogger("kmodels")
STATE = ".quant_state.bitsandbytes__"
_SIZE = Needed(range(1, 2**24))
STATES: Shape = {
    "quant_type": Needed(str),
    "blocksize": Needed(range(2, 2**13)),
    "shape": Needed([_SIZE.shape, _SIZE.shape]),
    "dtype": str,
    "nested_blocksize": int,
    "nested_offset": NUMBER,
    "nested_dtype": str,
}


@dataclass(frozen=True)
class PackedArray(LazyArray):
    """A tensor (out, in) of which a file has numbers of few bits; `read` returns float32.

    Args:
        quantization: how a layer keeps it, see `kmodels.layers.quantized.Quantization`.
        parts: returns the variables of such a layer by name.
        is_kept: whether `keep` keeps it if it is not told.
    """

    quantization: Any = None
    parts: Callable[[], dict[str, LazyArray]] = dict
    is_kept: bool = True


def grouped(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns the tensors of a file, those of bitsandbytes with their parts in one.

    Args:
        path: of the file or directory, for errors.
        tensors: all tensors by name.

    Raises:
        InputError: for parts that do not fit together.
    """
    states = {name.partition(STATE)[0]: name for name in tensors if STATE in name}
    if not states:
        return dict(tensors)
    left = {name: x for name, x in tensors.items() if name.rpartition(".")[0] not in states}
    for name, state in states.items():
        left.pop(state, None)
        left[name] = _joined(path, name, state, tensors)
    return {name: x for name, x in left.items() if STATE not in name}


def _joined(path: Path, name: str, state: str, tensors: Mapping[str, LazyArray]) -> LazyArray:
    where = f"{path}: {name}"
    try:
        described = json.loads(tensors[state].read().astype("uint8").tobytes())
    except ValueError:
        raise InputError(f"{where} is described by no JSON object; copy the file again") from None
    check_shape(described, Needed(STATES), f"{path}: {state}")
    mode, block = described["quant_type"], described["blocksize"]
    out, width = described["shape"]
    count, groups = out * width, -(-out * width // block)
    is_double = f"{name}.nested_absmax" in tensors
    wanted = {"quant_map": 16, "absmax": groups}
    if is_double:
        wanted |= {"nested_quant_map": 256, "nested_absmax": -(-groups // NESTED_BLOCK)}
    parts = {part: tensors.get(f"{name}.{part}") for part in wanted}
    packed = tensors.get(name)
    if packed is None or packed.nbytes != -(-count // 2):
        raise InputError(f"{where} does not hold {count:,} numbers of 4 bits; copy it again")
    for part, size in wanted.items():
        if (tensor := parts[part]) is None or int(np.prod(tensor.shape)) != size:
            raise InputError(f"{where} has no {part} of {size:,} numbers; copy it again")
    kinds = dict.fromkeys(wanted, "fV") | ({"absmax": "u"} if is_double else {})  # V: bfloat16
    for part, kind in kinds.items():
        if (dtype := parts[part].dtype).kind not in kind:  # type: ignore[union-attr]
            raise InputError(f"{where} has {part} of dtype {dtype}; copy it again")
    if mode not in TABLES or not state.endswith(mode):
        raise InputError(f"{where} has numbers of kind {mode!r}; {' and '.join(TABLES)} are read")
    if is_double and described.get("nested_blocksize") != NESTED_BLOCK:
        raise InputError(f"{where}: nested_blocksize is not {NESTED_BLOCK}, the only one read")

    def read(part: str) -> np.ndarray:
        return np.asarray(parts[part].read()).reshape(-1)  # type: ignore[union-attr]

    def codes() -> np.ndarray:
        return packed.read().reshape(-1).view("uint8")

    for part, table in (("quant_map", TABLES[mode]), ("nested_quant_map", DYNAMIC)):
        # The machine that made the file may have rounded its numbers in another way.
        if part in parts and not np.allclose(
            read(part).astype("float32"), table, rtol=0, atol=1e-6
        ):
            raise InputError(f"{where} has a {part} of its own; only that of {mode} is read")
    offset = np.float32(described.get("nested_offset") or 0.0)

    def scales() -> np.ndarray:
        if not is_double:
            return read("absmax").astype("float32")
        nested = read("nested_absmax").astype("float32").repeat(NESTED_BLOCK)[:groups]
        return DYNAMIC[read("absmax")] * nested + offset

    def floats() -> np.ndarray:
        both = codes()
        table = np.array(TABLES[mode], "float32")
        values = table[np.stack([both >> 4, both & 15], -1)].reshape(-1)[:count]
        return (values * scales().repeat(block)[:count]).reshape(out, width)

    if width % block:
        log.warning("%s: blocks of %d go on in the next row, so it becomes floats", where, block)
        return LazyArray((out, width), np.dtype("float32"), floats)

    def kept() -> dict[str, LazyArray]:
        numbers = {f"kernel_{mode}": (codes, (width // 2, out), "uint8")}
        by_group = (width // block, out)
        if not is_double:
            rest = {"kernel_scale": (scales, by_group, "float32")}
        else:
            rest = {
                "kernel_scale": (lambda: read("absmax").astype("uint8"), by_group, "uint8"),
                "kernel_nested_scale": (
                    lambda: read("nested_absmax").astype("float32"),
                    (wanted["nested_absmax"], 1),
                    "float32",
                ),
                "kernel_offset": (lambda: np.full(1, offset), (1, 1), "float32"),
            }
        return {
            part: LazyArray(
                shape,
                np.dtype(kind),
                lambda find=find, shape=shape: np.ascontiguousarray(find().reshape(shape[::-1]).T),
            )
            for part, (find, shape, kind) in (numbers | rest).items()
        }

    settings = {"mode": mode, "block": block, "double": is_double}
    return PackedArray((out, width), np.dtype("float32"), floats, None, None, settings, kept)


def _order_of_outputs(transform: Transform, outputs: int) -> np.ndarray | None:
    """Returns where a kernel has the outputs of its tensor, empty for the same order.

    None for a transform that does more than transpose and order them.
    """
    if transform is transpose:
        return np.arange(0)
    places = np.arange(2 * outputs).reshape(outputs, 2)  # of a kernel with two inputs
    try:
        turned = transform.forward(places)
    except ValueError:
        return None
    if turned.shape != (2, outputs):
        return None
    order = turned[0] // 2
    return order if np.array_equal(turned, places[order].T) else None


def keep(checkpoint: SourceCheckpoint, wanted: bool | None = None) -> SourceCheckpoint:
    """Returns a checkpoint whose packed tensors fill quantized layers as they are.

    One that is not the kernel of a linear layer becomes floats.

    Args:
        checkpoint: with all tensors.
        wanted: whether packed tensors are kept; None for the usual of their format.

    Raises:
        InputError: if they are wanted and there are none.
    """
    packed = {name: x for name, x in checkpoint.tensors.items() if isinstance(x, PackedArray)}
    packed = {name: x for name, x in packed.items() if (x.is_kept if wanted is None else wanted)}
    tensors, rules, layers = dict(checkpoint.tensors), list(checkpoint.rules), {}
    for name, rule in bind_sources(checkpoint.rules, packed).items():
        if rule is None or len(rule.targets) != 1:
            continue
        (target,) = rule.targets
        layer, _, kind = target.rpartition("/")
        if kind != "kernel":
            continue
        if (order := _order_of_outputs(rule.transform, packed[name].shape[0])) is None:
            continue
        del tensors[name]
        layers[layer] = packed[name].quantization
        for part, tensor in packed[name].parts().items():
            if len(order):
                tensor = tensor.map(tensor.shape, lambda x, order=order: x[:, order])
            tensors[f"{name}.{part}"] = tensor
            rules.append(Rule(f"{name}.{part}", f"{layer}/{part}"))
    if not layers:
        if wanted:
            raise InputError(
                f"{checkpoint.path} has no quantized kernels that a layer keeps; leave quantized "
                "out, or call quantize"
            )
        return checkpoint
    changes: dict[str, Any] = {**checkpoint.changes, "quantization": layers}
    return replace(checkpoint, tensors=tensors, rules=rules, changes=changes)
