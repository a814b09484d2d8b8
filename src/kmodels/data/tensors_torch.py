"""Tensors in the state of a loader, such as that of a generator."""

import numpy as np
import torch


def from_array(values: np.ndarray) -> torch.Tensor:
    """Returns a tensor with these values, in memory of its own."""
    return torch.from_numpy(np.array(values))
