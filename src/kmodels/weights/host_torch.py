"""Variables of torch on the host: values gathered, and host arrays assigned."""

import keras
import ml_dtypes
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from kmodels.core import keras_internals
from kmodels.weights.tensors import LazyArray


def in_parts(variable: keras.Variable) -> bool:
    """Returns True if this rank lacks some of the values."""
    if hasattr(variable, "gathered"):
        return True
    value = variable.value
    return isinstance(value, DTensor) and any(place.is_shard() for place in value.placements)


def whole(variable: keras.Variable) -> torch.Tensor:
    """Returns all values, gathered from the ranks."""
    value = variable.gathered() if hasattr(variable, "gathered") else variable.value
    return value.full_tensor() if isinstance(value, DTensor) else value


def fill(variable: keras.Variable, array: np.ndarray) -> None:
    """Copies the array into the variable's own memory, and casts it there.

    Keras would convert a bfloat16 array to float32 first: with the table of a large vocabulary that
    is the peak of the whole load.
    """
    tensor = _tensor(array)
    if (take := getattr(variable, "take", None)) is not None:
        take(tensor)  # keeps this rank's part
        return
    with torch.no_grad():
        if not keras_internals.has_value(variable):
            # Not the array's own memory: torch's is aligned for its widest instructions.
            keras_internals.give_value(variable, _empty(variable).copy_(tensor))
            return
        variable.value.copy_(tensor)


def fill_part(variable: keras.Variable, array: np.ndarray) -> None:
    """Copies this rank's part of a sharded variable."""
    variable.take_part(_tensor(array))


def fill_large(variable: keras.Variable, source: LazyArray) -> bool:
    """Reads a first value directly into its final memory; returns True if it could."""
    if keras_internals.has_value(variable) or hasattr(variable, "take"):
        return False
    tensor = _empty(variable)
    for start, part in source.rows():
        tensor[start : start + len(part)] = _tensor(part)
    keras_internals.give_value(variable, tensor)
    return True


def fill_mapped(variable: keras.Variable, source: LazyArray) -> bool:
    """Leaves the values in the mapped pages of their file; returns True if it could.

    It can for a first value in the dtype of the file. The pages are private to this process: a step
    that trains the variable copies the pages that it writes.
    """
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if (
        source.memory_map is None
        or source.dtype.name != dtype
        or keras_internals.has_value(variable)
        or hasattr(variable, "take")
    ):
        return False
    keras_internals.give_value(variable, _tensor(source.memory_map()))
    return True


def _empty(variable: keras.Variable) -> torch.Tensor:
    kind = getattr(torch, keras.backend.standardize_dtype(variable.dtype))
    return torch.empty(variable.shape, dtype=kind)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor in the array's memory, bfloat16 included."""
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that it may not write
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as an array that shares its memory, bfloat16 included."""
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
