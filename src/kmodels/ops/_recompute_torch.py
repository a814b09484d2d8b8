"""Blocks and rows whose backward pass recomputes them, on torch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kmodels.core.internals_torch import transformed
from kmodels.ops._recompute import Block


def blockwise(
    function: Callable[..., Any],
    blocks: Sequence[Block],
    tensors: tuple[Any, Any, Any],
    others: Any,
) -> Any:
    """See `RecomputeBackend.blockwise`; torch.func and traces keep activations."""
    run = _recomputed(function)
    outputs = [run(*block, *tensors, others) for block in blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def by_rows(function: Callable[..., Any], parts: Sequence[Any], others: Sequence[Any]) -> Any:
    """See `RecomputeBackend.by_rows`; torch.func and traces keep activations."""
    run = _recomputed(function)
    return torch.stack([run(*part, *others) for part in zip(*parts, strict=True)])


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    if not torch.is_grad_enabled() or transformed() is not None:
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
