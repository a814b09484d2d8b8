"""Importance matrices of llama.cpp: how much an error in each column of a tensor counts.

`llama-imatrix` writes the sums of squares of a tensor's inputs, as a GGUF file or, before 2025, as
a file of another format (.dat).
"""

import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.blocks.gguf.quantizing import WEIGHTED
from kmodels.models.blocks.gguf.tensors import OUTPUT, PER_LAYER_TABLE, TABLE
from kmodels.weights.gguf import open_gguf, setting

log = logging.getLogger("kmodels")
SUMS, COUNTS = ".in_sum2", ".counts"
# Names in a warning.
SHOWN = 8


def read(path: Path) -> dict[str, np.ndarray]:
    """Returns the importance of the columns of each tensor, of all its experts in one (n,) float32.

    Args:
        path: path of a file of llama-imatrix.

    Raises:
        InputError: for a file that is damaged, or no importance matrix.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        matrix = _gguf(path) if is_gguf else _legacy(path.read_bytes())
    except InputError:
        raise
    except (OSError, ValueError, struct.error) as error:
        raise InputError(
            f"{path} is not an importance matrix ({error}); give a file that llama-imatrix wrote"
        ) from None
    for name, values in matrix.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise InputError(
                f"{path} holds NaN, infinite or negative values of {name}; compute it again"
            )
    return matrix


def _gguf(path: Path) -> dict[str, np.ndarray]:
    reader = open_gguf(path)
    if (kind := setting(reader, "general.type")) != "imatrix":
        raise ValueError(f"its general.type is {kind!r}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
    others = [name for name in tensors if not name.endswith((SUMS, COUNTS))]
    if others:
        log.warning("%s: %s are not used", path, _listed(others))
    matrix = {}
    for name in names:
        parts = [tensors.get(f"{name}{end}") for end in (SUMS, COUNTS)]
        if any(part is None or part.tensor_type.name != "F32" for part in parts):
            raise ValueError(f"{name} has no float32 {SUMS} and {COUNTS}")
        sums, counts = [np.array(part.data, "float32") for part in parts]  # type: ignore[union-attr]
        if counts.size == 0 or sums.size % counts.size:
            raise ValueError(f"{name} has {sums.size} sums and {counts.size} counts")
        counts = np.rint(counts.reshape(-1, 1))
        with np.errstate(all="ignore"):
            means = sums.reshape(len(counts), -1) / counts
        # An expert without a token says nothing about its columns.
        matrix[name] = np.where(counts > 0, means, np.float32(1)).reshape(-1)
    if not matrix:
        raise ValueError(f"it holds no tensor that ends in {SUMS}")
    return matrix


def _legacy(data: bytes) -> dict[str, np.ndarray]:
    (count,) = struct.unpack_from("<i", data)
    at, matrix = 4, {}
    if count < 1:
        raise ValueError(f"it announces {count} tensors")
    for _ in range(count):
        (size,) = struct.unpack_from("<i", data, at)
        if not 0 < size < 2**12 or at + size > len(data):
            raise ValueError(f"it has a name of {size} bytes")
        name = data[at + 4 : at + 4 + size].decode()
        at += 4 + size
        calls, number = struct.unpack_from("<ii", data, at)
        at += 8
        if number < 1 or at + 4 * number > len(data):
            raise ValueError(f"it ends inside {name}")
        values = np.frombuffer(data, "<f4", number, at).astype("float32")
        matrix[name] = values / np.float32(calls) if calls > 0 else values
        at += 4 * number
    return matrix


def of_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Returns the importance of the columns of the tensors whose types use it.

    Args:
        path: path of a file of llama-imatrix.
        shapes: shapes by names in the file that is written.
        types: their types.

    Returns:
        (n,) float32 by name, (E, n) for a tensor of experts.

    Raises:
        InputError: for a file that is damaged, or that of another model.
    """
    matrix = read(path)
    used = {}
    for name in [name for name, kind in types.items() if kind in WEIGHTED and name in matrix]:
        shape = (*shapes[name][:-2], shapes[name][-1])
        if matrix[name].size != math.prod(shape):
            raise InputError(
                f"{path} holds {matrix[name].size} values of {name}, which has {math.prod(shape)}; "
                "give the importance matrix of this model"
            )
        used[name] = matrix[name].reshape(shape)
    if not used:
        raise InputError(
            f"{path} holds none of the quantized tensors, but {_listed(list(matrix))}; give the "
            "importance matrix of this model"
        )
    # llama-imatrix leaves out the output layer.
    own = {name for name, kind in types.items() if kind in WEIGHTED}
    if lost := sorted(own - {*used, TABLE, OUTPUT, PER_LAYER_TABLE}):
        log.warning("%s holds no importance of %s; they are quantized without", path, _listed(lost))
    if others := sorted(matrix.keys() - shapes.keys()):
        log.warning("%s: %s are no tensors of the model and are not used", path, _listed(others))
    return used


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
