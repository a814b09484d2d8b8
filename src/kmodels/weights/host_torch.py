"""Host arrays into torch variables."""

from typing import Any

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
