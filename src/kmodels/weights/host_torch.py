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


def fill_directly(variable: keras.Variable, source: LazyArray) -> bool:
    """Fills this rank's part of a sharded variable, or a first value.

    That of a table which is only looked up stays in the mapped pages of its file, if the dtype is
    the same. The pages are private to this process: a step that trains the variable copies the
    pages that it writes. A large one is read into its final memory.
    """
    if (index := getattr(variable, "index", None)) is not None:
        variable.take_part(_tensor(source.part(index)))
        return True
    if keras_internals.has_value(variable) or hasattr(variable, "take"):
        return False
    same = source.dtype.name == keras.backend.standardize_dtype(variable.dtype)
    if getattr(variable, "is_looked_up", False) and same and source.memory_map is not None:
        tensor = _tensor(source.memory_map())
    elif source.is_large:
        tensor = _empty(variable)
        for start, part in source.rows():
            tensor[start : start + len(part)] = _tensor(part)
    else:
        return False
    keras_internals.give_value(variable, tensor)
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
