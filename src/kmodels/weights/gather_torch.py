"""Tensors of which each rank holds a part, gathered."""

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    import keras


def in_parts(variable: "keras.Variable") -> bool:
    """See `gather`."""
    if hasattr(variable, "gathered"):
        return True
    value = variable.value
    return isinstance(value, DTensor) and any(place.is_shard() for place in value.placements)


def whole(variable: "keras.Variable") -> torch.Tensor:
    """See `gather`."""
    value = variable.gathered() if hasattr(variable, "gathered") else variable.value
    return value.full_tensor() if isinstance(value, DTensor) else value
