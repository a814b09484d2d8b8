"""Attention by blocks on torch, with gradient checkpointing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kmodels.core.internals_torch import transformed
from kmodels.ops.attention import Block


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence[Block],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`; torch.func and traces keep activations."""
    keeps = not torch.is_grad_enabled() or transformed() is not None
    outputs = []
    for block in blocks:
        if keeps:
            outputs.append(function(*block, *tensors, others))
        else:
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            outputs.append(checkpoint(function, *block, *tensors, others, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
