"""The patch embedding of a file for pictures of another number of channels, by timm's rule."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kmodels.models.vit.config import ViTConfig
from kmodels.weights import Rule, Transform

KERNEL = "patch_embedding/kernel"


def adapt_rules(rules: Sequence[Rule], held: ViTConfig, wanted: ViTConfig) -> Sequence[Rule]:
    """Rules of a file whose patch kernel fits another number of channels.

    Args:
        rules: of the file.
        held: config of the file.
        wanted: config of the model.
    """
    old, new = held.image_shape[2], wanted.image_shape[2]
    if old == new:
        return rules
    return [
        replace(rule, transform=_adapted(rule.transform, held.patch_size, old, new))
        if rule.target == KERNEL
        else rule
        for rule in rules
    ]


def _adapted(transform: Transform, patch: int, old: int, new: int) -> Transform:
    def forward(x: np.ndarray) -> np.ndarray:
        kernel = transform.forward(x)
        found = adapt(kernel.reshape(patch, patch, old, -1).astype("float32"), new)
        return found.reshape(patch * patch * new, -1).astype(kernel.dtype)

    def inverse(x: np.ndarray) -> np.ndarray:
        # Asked for the shape of the file's tensor alone: what was summed cannot be taken apart.
        rows = patch * patch * old
        return transform.inverse(np.broadcast_to(np.zeros((), x.dtype), (rows, x.shape[-1])))

    return Transform(forward, inverse)


def adapt(kernel: np.ndarray, channels: int) -> np.ndarray:
    """A kernel (p, p, C, D) for another number of channels.

    One channel gets the sum over all, so that a grey picture gives what the same picture in equal
    channels gave. Otherwise the channels are repeated in turn, scaled by old / new.

    Source:
        timm's `adapt_input_conv`.
    """
    old = kernel.shape[2]
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    turn = np.arange(channels) % old
    return kernel[:, :, turn] * np.float32(old / channels)


def adapt_statistics(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Mean or deviation by channel, for another number of channels: averaged, or in turn."""
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[i % len(values)] for i in range(channels))
