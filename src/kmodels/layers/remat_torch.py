"""Gradient checkpointing on torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from kmodels.core import internals_torch, seeds_torch

if TYPE_CHECKING:
    import keras


def call(
    layer: "keras.Layer",
    fn: Callable[..., Any],
    seeds: list[Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """See `RematBackend.call`."""
    # Transforms of torch.func have no hooks for it: inside them activations are kept.
    if not torch.is_grad_enabled() or internals_torch.in_transform():
        return fn(*args, **kwargs)
    begun = [seeds_torch.hold(seed) for seed in seeds]
    first = True

    def run(*args: object, **kwargs: object) -> Any:
        nonlocal first
        if first:
            first = False
            return fn(*args, **kwargs)
        now = [seeds_torch.hold(seed) for seed in seeds]
        _assign(seeds, begun)
        try:
            return fn(*args, **kwargs)
        finally:
            _assign(seeds, now)

    # early_stop raises an exception, to which Keras adds arguments: a cycle that keeps the
    # recomputed tensors alive.
    options = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False}
    return checkpoint(run, *args, **options, **kwargs)


def _assign(seeds: list[Any], states: list[seeds_torch.Held]) -> None:
    for seed, state in zip(seeds, states, strict=True):
        seeds_torch.give_back(seed, state)
