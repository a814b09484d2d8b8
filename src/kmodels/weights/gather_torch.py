"""Tensors of which each rank holds a part, gathered."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def in_parts(variable: Any) -> bool:
    """See `gather`."""
    if hasattr(variable, "gathered"):
        return True
    value = variable.value
    return isinstance(value, DTensor) and any(place.is_shard() for place in value.placements)


def whole(variable: Any) -> torch.Tensor:
    """See `gather`."""
    value = variable.gathered() if hasattr(variable, "gathered") else variable.value
    return value.full_tensor() if isinstance(value, DTensor) else value
