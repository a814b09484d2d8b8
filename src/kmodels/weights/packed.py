"""Linear weights of few bits in the files of other packages, read as floats or kept as they are.

- bitsandbytes (nf4, fp4): beside a tensor "x" lie "x.absmax", "x.quant_map" and
  "x.quant_state.bitsandbytes__nf4" (or fp4), a JSON object as bytes; with scales in 8 bits
  "x.nested_absmax" and "x.nested_quant_map" too.
- GPTQ and AWQ: "x.qweight" holds eight numbers of 4 bits in an int32, of eight inputs in GPTQ and
  of eight outputs in AWQ. "x.qzeros" holds the number that stands for zero, of eight outputs in
  both, and "x.scales" the size of a step, for each group of inputs and each output. With GPTQ,
  "x.g_idx" may say the group of each input.
- FP8 of transformers and compressed-tensors: "x.weight" holds float8_e4m3fn, and
  "x.weight_scale_inv" (transformers) or "x.weight_scale" (compressed-tensors) the factor of each
  block of outputs and inputs, of each output, or of all. Scales of activations are left out.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.few_bits import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.core.schema import NUMBER, Needed, Shape, check_shape, read_optional
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
    """Returns the tensors of a file or directory, those of few bits with their parts in one.

    Raises:
        InputError: for parts that do not fit together, or a directory that does not say what they
            are.
    """
    return _of_gptq(path, _of_bitsandbytes(path, _of_float8(path, tensors)))


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


def _of_bitsandbytes(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    states = {name.partition(STATE)[0]: name for name in tensors if STATE in name}
    if not states:
        return dict(tensors)
    left = {name: x for name, x in tensors.items() if name.rpartition(".")[0] not in states}
    for name, state in states.items():
        left.pop(state, None)
        left[name] = _join_four_bits(path, name, state, tensors)
    return {name: x for name, x in left.items() if STATE not in name}


def _join_four_bits(
    path: Path, name: str, state: str, tensors: Mapping[str, LazyArray]
) -> LazyArray:
    where = f"{path}: {name}"
    try:
        described = json.loads(tensors[state].read().astype("uint8").tobytes())
    except (ValueError, RecursionError):
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


WEIGHT, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
# Four bits of an int32 from its lowest on, as outputs in AWQ.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SMALLEST_GROUP = 32


def _of_gptq(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    names = [name.removesuffix(f".{WEIGHT}") for name in tensors if name.endswith(f".{WEIGHT}")]
    if not names:
        return dict(tensors)
    described = read_optional(path / "config.json").get("quantization_config")
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
        left[f"{name}.weight"] = _join_gptq(f"{path}: {name}", name, tensors, method == "awq", more)
    return left


def _join_gptq(
    where: str, name: str, tensors: Mapping[str, LazyArray], is_awq: bool, more: int
) -> LazyArray:
    stored = {part: tensors.get(f"{name}.{part}") for part in (WEIGHT, ZEROS, SCALES, GROUPS)}
    if lost := [part for part in (WEIGHT, ZEROS, SCALES) if stored[part] is None]:
        raise InputError(f"{where} has no {lost[0]}; copy the file again")
    parts: dict[str, Any] = {part: tensor for part, tensor in stored.items() if tensor is not None}
    if any(len(parts[part].shape) != 2 for part in (WEIGHT, ZEROS, SCALES)):
        raise InputError(f"{where} has parts that are no matrices; copy the file again")
    kinds = {WEIGHT: "i", ZEROS: "i", GROUPS: "i", SCALES: "fV"}  # V: bfloat16
    for part, tensor in parts.items():
        is_int32 = tensor.dtype.itemsize == 4 or part in (SCALES, GROUPS)
        if tensor.dtype.kind not in kinds[part] or not is_int32:
            raise InputError(f"{where} has {part} of dtype {tensor.dtype}; copy the file again")
    groups, out = parts[SCALES].shape
    rows = parts[WEIGHT].shape[0]
    width = rows if is_awq else rows * 8
    shapes = {
        WEIGHT: (width, out // 8) if is_awq else (width // 8, out),
        ZEROS: (groups, out // 8),
    }
    wrong = [part for part, shape in shapes.items() if parts[part].shape != shape]
    if wrong or out % 8 or groups < 1 or width % groups or (GROUPS in parts and is_awq):
        raise InputError(
            f"{where} has a {(wrong or [SCALES])[0]} of another size than 4 bits have; directories "
            "with another number of bits are not read"
        )
    group = width // groups

    def codes() -> np.ndarray:
        values = _numbers(parts[WEIGHT].read())
        if is_awq:
            return _outputs(values, ORDER)
        return values.swapaxes(1, 2).reshape(width, out)

    def zeros() -> np.ndarray:
        values = _outputs(_numbers(parts[ZEROS].read()), ORDER if is_awq else range(8))
        return (values + more) & 15

    def scales() -> np.ndarray:
        return np.asarray(parts[SCALES].read(), "float32")

    index = np.arange(width) // group
    if GROUPS in parts:
        index = np.asarray(parts[GROUPS].read()).reshape(-1)
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


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_SCALES = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = ("input_scale", "activation_scale", "output_scale")
SMALLEST_BLOCK = 32


def _of_float8(path: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    names = [name for name, tensor in tensors.items() if tensor.dtype == FLOAT8]
    if not names:
        return dict(tensors)
    left, blocks = dict(tensors), _blocks(path)
    for name in names:
        layer, _, kind = name.rpartition(".")
        scales = [f"{layer}.{part}" for part in FLOAT8_SCALES if f"{layer}.{part}" in tensors]
        if kind != "weight" or len(tensors[name].shape) != 2 or len(scales) != 1:
            raise InputError(
                f"{path}: {name} is in FP8, and only weights of linear layers with a "
                f"{' or '.join(FLOAT8_SCALES)} are read so; give the whole directory"
            )
        for part in (*FLOAT8_SCALES, *OF_ACTIVATIONS):
            left.pop(f"{layer}.{part}", None)
        left[name] = _join_float8(f"{path}: {name}", tensors[name], tensors[scales[0]], blocks)
    return left


def _blocks(path: Path) -> list[tuple[int, int]]:
    """Returns the sizes (outputs, inputs) of the blocks that a config.json announces."""
    sizes = []
    description = read_optional(path / "config.json")
    for part in (description, description.get("text_config") or {}):
        described = part.get("quantization_config") or {}
        sizes.append(described.get("weight_block_size"))
        for group in (described.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            sizes.append(weights.get("block_structure"))
            sizes.append([1, weights.get("group_size") or 0])
    return [(out, width) for out, width in filter(None, sizes) if out > 0 and width > 0]


def _join_float8(
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
