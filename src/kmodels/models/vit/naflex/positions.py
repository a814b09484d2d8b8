"""A table of positions, resized inside the graph to the grid of each image.

`kmodels.weights.positions` does the same once for one grid, with NumPy. Here each patch has weights
over the rows and over the columns of the table, so that grids are numbers and not shapes: one
compiled step serves all of them.
"""

from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.weights.positions import Method


def _cubic(distance: Tensor, a: float) -> Any:
    """Returns Keys' kernel (Keys 1981, eq. 15) with parameter `a`."""
    x = keras.ops.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return keras.ops.where(x < 1.0, near, keras.ops.where(x < 2.0, far, 0.0))


def _triangle(distance: Tensor) -> Any:
    return keras.ops.maximum(1.0 - keras.ops.abs(distance), 0.0)


def resize_weights(place: Tensor, new: Tensor, old: int, method: Method) -> Any:
    """Returns what a sample of a resized axis is made of; see `weights.positions.resize_matrix`.

    Args:
        place: (...) float, numbers of the samples, from 0.
        new: (...) float, samples of the resized axis.
        old: samples of the axis itself.
        method: as there.

    Returns:
        (..., old), whose last axis sums to 1.
    """
    ops = keras.ops
    place, new = ops.expand_dims(place, -1), ops.expand_dims(new, -1)
    scale = old / new
    centre = (place + 0.5) * scale
    columns = ops.arange(old, dtype=place.dtype)
    if method.endswith("_antialias"):
        distance = (columns + 0.5 - centre) / ops.maximum(scale, 1.0)
        bilinear = method == "bilinear_antialias"
        found = _triangle(distance) if bilinear else _cubic(distance, -0.5)
        return found / ops.sum(found, axis=-1, keepdims=True)
    position = centre - 0.5
    if method == "bilinear":
        return _triangle(columns - ops.clip(position, 0.0, old - 1.0))
    start = ops.floor(position)
    # Samples beyond the ends are those at the ends.
    taps = [
        _cubic(position - (start + tap), -0.75)
        * ops.cast(ops.equal(columns, ops.clip(start + tap, 0.0, old - 1.0)), place.dtype)
        for tap in range(-1, 3)
    ]
    return taps[0] + taps[1] + taps[2] + taps[3]


def resized_positions(
    table: Tensor, grid: tuple[int, int], places: Tensor, sizes: Tensor, method: Method
) -> Any:
    """Returns the position of each patch.

    Args:
        table: (rows * columns, D).
        grid: rows and columns of the table.
        places: (B, N, 2) float, row and column of each patch in its image.
        sizes: (B, N, 2) float, rows and columns of that image.
        method: how the table is resized.

    Returns:
        (B, N, D), in the dtype of the table.
    """
    ops = keras.ops
    down, across = (
        resize_weights(places[..., axis], sizes[..., axis], grid[axis], method) for axis in (0, 1)
    )
    both = ops.expand_dims(down, -1) * ops.expand_dims(across, -2)  # (B, N, rows, columns)
    shape = ops.shape(both)
    weights = ops.reshape(both, (shape[0], shape[1], grid[0] * grid[1]))
    return ops.matmul(ops.cast(weights, table.dtype), table)
