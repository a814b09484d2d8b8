"""Tensors in the state of a loader, such as that of a generator."""

import numpy as np
import torch


def from_array(values: np.ndarray) -> torch.Tensor:
    """Returns a tensor with a copy of these values."""
    return torch.from_numpy(np.array(values))
