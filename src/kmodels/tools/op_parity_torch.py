"""The part of torch in `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[torch.Tensor]
) -> tuple[Any, Sequence[Any]]:
    """See `OpParityBackend.gradients`."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value, rest = function(*leaves)
    return rest.detach(), torch.autograd.grad(value, leaves, allow_unused=True)
