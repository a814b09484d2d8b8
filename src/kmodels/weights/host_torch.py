"""Host arrays to torch tensors."""

from typing import Any

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
