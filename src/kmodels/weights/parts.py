"""Tensors in parts in several safetensors files, written by the processes of a run.

The header of each file has the offsets of its parts in the whole tensors, in the format of
`torch.distributed.checkpoint`, whose `HuggingFaceStorageReader` reads such files too:

    "DCP_SHARDING_INFO": {"block_0/mlp/up/kernel": {"saved_offsets": [0, 32]}, ...}
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.weights.files import read_metadata, read_safetensors, write_safetensors
from kmodels.weights.tensors import Index, LazyArray

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
Start = tuple[int, ...]
Part = tuple[Start, LazyArray]


def write_parts(path: Path, parts: Mapping[str, tuple[Start, np.ndarray]]) -> None:
    """Writes one file.

    Args:
        path: path of the file to create.
        parts: (offsets, values) by the name of the whole tensor.
    """
    tensors = {
        name: LazyArray(values.shape, values.dtype, lambda values=values: values)
        for name, (_, values) in sorted(parts.items())
    }
    offsets = {name: {OFFSETS: list(start)} for name, (start, _) in sorted(parts.items())}
    write_safetensors(path, tensors, {"format": "kmodels", SHARDING: json.dumps(offsets)})


def read_parts(files: Sequence[Path]) -> dict[str, LazyArray]:
    """Returns the whole tensors of several files; only the parts that are needed are read.

    Args:
        files: all files; those without offsets have whole tensors.

    Raises:
        InputError: for a file that is damaged, or parts that leave a gap.
    """
    found: dict[str, list[Part]] = {}
    for file in files:
        offsets = _offsets(file)
        for name, array in read_safetensors(file).items():
            start = offsets.get(name, {}).get(OFFSETS, [0] * len(array.shape))
            if len(start) != len(array.shape) or not all(isinstance(n, int) for n in start):
                raise InputError(f"{file} says that {name} begins at {start}; copy it again")
            found.setdefault(name, []).append((tuple(start), array))
    return {name: _join(name, parts, files[0].parent) for name, parts in sorted(found.items())}


def _offsets(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_metadata(file).get(SHARDING, "{}")))
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file} has a damaged {SHARDING}; copy it again") from error


def _join(name: str, parts: list[Part], folder: Path) -> LazyArray:
    ends = [tuple(np.add(start, array.shape)) for start, array in parts]
    shape = tuple(int(max(sizes)) for sizes in zip(*ends, strict=True))
    if len(parts) == 1 and not any(parts[0][0]):
        return parts[0][1]
    if sum(math.prod(array.shape) for _, array in parts) != math.prod(shape):
        raise InputError(f"{folder} lacks parts of {name}; copy the directory again")

    def read_part(index: Index) -> np.ndarray:
        wanted = [piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True)]
        whole = np.empty([stop - start for start, stop in wanted], parts[0][1].dtype)
        for begin, array in parts:
            # The overlap of the wanted range and this part, in indices of the whole tensor.
            low = [max(a, start) for a, (start, _) in zip(begin, wanted, strict=True)]
            high = [
                min(a + size, stop)
                for a, size, (_, stop) in zip(begin, array.shape, wanted, strict=True)
            ]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = _slices(low, high, [start for start, _ in wanted])
                whole[target] = array.part(_slices(low, high, begin))
        return whole

    everything = tuple(slice(0, size) for size in shape)
    return LazyArray(shape, parts[0][1].dtype, lambda: read_part(everything), read_part)


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Index:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
