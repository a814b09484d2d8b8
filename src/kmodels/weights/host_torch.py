"""Host arrays to torch tensors."""

from typing import Any

import ml_dtypes
import numpy as np
import torch


def tensor(array: np.ndarray) -> Any:
    """The array as a tensor that shares its memory, bfloat16 included.

    Keras widens a bfloat16 array to float32 on its way: for the table of a large vocabulary that is
    the peak of the whole load.
    """
    if array.dtype.name != "bfloat16":
        return array
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array that shares its memory, bfloat16 included."""
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
