"""Rows of each example of a batch by their numbers."""

from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers.base import reshape, shape_of


def rows(x: Tensor, index: Tensor) -> Any:
    """Returns (B, n, D) of x (B, T, D) by int (B, n): one `take`, whose gradient is one scatter."""
    batch, length, width = shape_of(x)
    first = keras.ops.expand_dims(keras.ops.arange(batch, dtype=index.dtype) * length, 1)
    taken = keras.ops.take(reshape(x, (-1, width)), reshape(index + first, (-1,)), axis=0)
    return reshape(taken, (batch, index.shape[1], width))
