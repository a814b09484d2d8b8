"""Labels as whole numbers: those to ignore, and those that no class has."""

from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, same_shape
from kmodels.ops.linear_cross_entropy import IGNORED


def check_classes(y: np.ndarray, classes: int, ignored: Collection[int] = (IGNORED,)) -> None:
    """Raises `InputError` for a label that is neither ignored nor one of 0 to classes - 1."""
    if y.size and y.dtype.kind in "iu" and y.min() >= 0 and y.max() < classes:
        return
    wrong = ~((y >= 0) & (y < classes) & (y == np.floor(y)))
    for label in ignored:
        wrong &= y != label
    if wrong.any():
        others = " or ".join(map(str, ignored))
        raise InputError(
            f"a label is {y[wrong].flat[0]}; give 0 to {classes - 1}"
            + (f", or {others} for one that does not count" if others else "")
        )


def check_pixels(labels: Any, outputs: Any) -> None:
    """Raises `InputError` for masks of another shape than the predictions.

    Args:
        labels: (B, ...), or (B, ..., 1).
        outputs: (B, ..., classes).
    """
    shape, wanted = tuple(labels.shape), tuple(outputs.shape)[:-1]
    pixels = shape[:-1] if len(shape) > len(wanted) and shape[-1] == 1 else shape
    if not same_shape(pixels, wanted):
        raise InputError(
            f"masks have shape {shape} and predictions {tuple(outputs.shape)}; give the number of "
            "a class for each pixel"
        )


def mask_ignored(labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Returns labels and weights with 0 for ignored labels, and a mask of the others.

    Args:
        labels: (...) or (..., 1), numbers.
        outputs: (..., classes).
        weights: (...), fewer dimensions, or None for ones.

    Returns:
        Labels (...), weights (...), mask (...), bool.
    """
    ops = keras.ops
    labels = ops.convert_to_tensor(labels)
    if len(labels.shape) == len(outputs.shape):
        labels = ops.squeeze(labels, -1)
    counted = ops.not_equal(ops.cast(labels, "int32"), IGNORED)
    weight = ops.cast(counted, "float32")
    if weights is not None:
        weight = weight * like(weights, counted, "float32")
    return ops.where(counted, labels, ops.zeros_like(labels)), weight, counted


def like(weights: Any, labels: Any, dtype: str) -> Any:
    """Returns weights as numbers with as many axes as labels.

    Raises:
        InputError: for weights that are neither of samples nor of labels.
    """
    weights = keras.ops.cast(keras.ops.convert_to_tensor(weights), dtype)
    shape, wanted = tuple(weights.shape), tuple(labels.shape)
    sizes = shape[:-1] if len(shape) > len(wanted) and shape[-1] == 1 else shape
    if len(sizes) > len(wanted) or any(
        own not in (1, None, size) and size is not None
        for own, size in zip(sizes, wanted, strict=False)
    ):
        raise InputError(
            f"sample_weight has shape {shape} beside labels of shape {wanted}; give one for each "
            "sample, or for each label"
        )
    if len(sizes) < len(shape):
        return keras.ops.squeeze(weights, -1)
    more = (1,) * (len(wanted) - len(shape))
    return keras.ops.reshape(weights, (*keras.ops.shape(weights), *more))
