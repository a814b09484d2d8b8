"""Position embeddings and patch kernels of a file, or of a model, for other images.

Positions are for another size; the kernel is for other channels or other patches, by timm's rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kmodels.models.vit.config import ViTConfig
from kmodels.weights import LazyArray, Rule, Transform
from kmodels.weights.positions import Method, fit_positions, resize_matrix

Tensors = Mapping[str, LazyArray]


def fitting(
    config: ViTConfig, name: str, flat: bool = False
) -> Callable[[Tensors, ViTConfig], Tensors]:
    """Returns a function that resizes the position embedding `name` of a file, if there is one.

    With `flat` it is (rows, D) instead of (1, rows, D).
    """

    def fit(tensors: Tensors, wanted: ViTConfig) -> Tensors:
        if name not in tensors:
            return tensors
        table = tensors[name]
        if flat:
            table = table.map((1, *table.shape), lambda x: x[None])
        table = fit_positions(
            table,
            config.grid,
            wanted.grid,
            config.num_special_positions,
            wanted.position_interpolation,
        )
        return {**tensors, name: table.map(table.shape[1:], lambda x: x[0]) if flat else table}

    return fit


KERNEL = "patch_embedding/kernel"


def adapt_rules(rules: Sequence[Rule], stored: ViTConfig, wanted: ViTConfig) -> Sequence[Rule]:
    """Rules of a file whose patch kernel fits other channels and patches."""
    old, new = ((c.patch_size, c.image_shape[2]) for c in (stored, wanted))
    if old == new:
        return rules
    smooth = not stored.position_interpolation.startswith("bilinear")
    method: Method = "bicubic_antialias" if smooth else "bilinear"
    return [
        replace(rule, transform=_adapted(rule.transform, old, new, method))
        if rule.target == KERNEL
        else rule
        for rule in rules
    ]


def _adapted(
    transform: Transform, old: tuple[int, int], new: tuple[int, int], method: Method
) -> Transform:
    """Returns the change from (side, channels) of the file to those of the model."""
    (side, channels), (new_side, new_channels) = old, new

    def forward(x: np.ndarray) -> np.ndarray:
        kernel = transform.forward(x)
        fitted = kernel.reshape(side, side, channels, -1).astype("float32")
        fitted = adapt(resample(fitted, new_side, method), new_channels)
        return fitted.reshape(new_side * new_side * new_channels, -1).astype(kernel.dtype)

    def inverse(x: np.ndarray) -> np.ndarray:
        # Used for the shape of the file's tensor only: the sum cannot be inverted.
        rows = side * side * channels
        return transform.inverse(np.broadcast_to(np.zeros((), x.dtype), (rows, x.shape[-1])))

    return Transform(forward, inverse)


def adapt(kernel: np.ndarray, channels: int) -> np.ndarray:
    """Returns a kernel (p, p, C, D) for another number of channels.

    One channel gets the sum over all, so that a grey image has the same result as an image with
    equal channels. Otherwise the channels are repeated in turn, scaled by old / new.

    Source:
        timm's `adapt_input_conv`.
    """
    old = kernel.shape[2]
    if channels == 1:
        return kernel.sum(axis=2, keepdims=True)
    turn = np.arange(channels) % old
    return kernel[:, :, turn] * np.float32(old / channels)


def resample(kernel: np.ndarray, side: int, method: Method = "bicubic_antialias") -> np.ndarray:
    """Returns a kernel (p, p, C, D) for patches of another side.

    It is the one whose products with resized patches come closest to those of the kernel with the
    patches as they were, for all patches alike; with larger patches they are equal.

    Args:
        kernel: float32.
        side: side of the new patches.
        method: by which patches would be resized, of `weights.positions.resize_matrix`.

    Source:
        Beyer et al. 2023 (FlexiViT, arXiv:2212.08013, section 3.4); timm's `resample_patch_embed`,
        which resizes by "bicubic_antialias", in `.npz` files by "bilinear".
    """
    if side == kernel.shape[0]:
        return kernel
    # Resizing is separable, and so is the pseudoinverse of its matrix.
    back = np.linalg.pinv(resize_matrix(kernel.shape[0], side, method))  # (p, side)
    resampled = np.einsum("ai,bj,abcd->ijcd", back, back, kernel.astype("float64"), optimize=True)
    return resampled.astype(kernel.dtype)


def adapt_statistics(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Returns mean or deviation for another number of channels, averaged or repeated."""
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[i % len(values)] for i in range(channels))
