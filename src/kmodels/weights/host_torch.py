"""Host arrays into torch variables."""

from typing import Any

import ml_dtypes
import numpy as np
import torch


def fill(variable: Any, array: np.ndarray) -> None:
    """Copies the array into the variable's own memory, cast on the way.

    Keras widens a bfloat16 array to float32 on its way: for the table of a large vocabulary that is
    the peak of the whole load.
    """
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that it may not write
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    with torch.no_grad():
        variable.value.copy_(tensor)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array that shares its memory, bfloat16 included."""
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
