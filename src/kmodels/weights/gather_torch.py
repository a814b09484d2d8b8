"""Tensors of which each rank holds a part, gathered."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def whole(variable: Any) -> torch.Tensor:
    """See `gather`."""
    value = variable.gathered() if hasattr(variable, "gathered") else variable.value
    return value.full_tensor() if isinstance(value, DTensor) else value
