"""Values of maps at points between their pixels, as torch's `grid_sample` gives them."""

from typing import Any

import keras

from kmodels.core.types import Tensor


def corners(points: Tensor, size: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Returns the four pixels around each point, and what each counts.

    Pixels are centered, and what lies outside of the map counts as zero: `grid_sample` with
    `align_corners=False` and its padding of zeros.

    Args:
        points: (..., 2), (x, y) from 0 to 1.
        size: (height, width) of the map.

    Returns:
        Four pairs of int32 numbers of pixels, row by row, and weights, both (...).
    """
    ops, (height, width) = keras.ops, size
    points = ops.convert_to_tensor(points)
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = ops.floor(x), ops.floor(y)
    found = []
    for down in (0, 1):
        for along in (0, 1):
            column, row = left + along, top + down
            weight = (1 - ops.abs(x - column)) * (1 - ops.abs(y - row))
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            index = ops.clip(row, 0, height - 1) * width + ops.clip(column, 0, width - 1)
            found.append((ops.cast(index, "int32"), ops.where(inside, weight, 0.0)))
    return found


def rows_of(x: Tensor, index: Tensor) -> Any:
    """Returns chosen rows of each example.

    Args:
        x: (B, N, ...), where N is known.
        index: int32 (B, K).

    Returns:
        (B, K, ...).
    """
    ops, (length, *rest) = keras.ops, tuple(x.shape)[1:]
    batch = ops.shape(x)[0]
    start = ops.expand_dims(ops.arange(batch, dtype="int32") * length, 1)
    flat = ops.reshape(x, (-1, *rest))
    found = ops.take(flat, ops.reshape(ops.cast(index, "int32") + start, (-1,)), axis=0)
    return ops.reshape(found, (batch, index.shape[1], *rest))


def at_shared_points(maps: Tensor, points: Tensor) -> Any:
    """Returns what all maps of an example have at the same points.

    Args:
        maps: floating (B, N, H, W).
        points: (B, P, 2).

    Returns:
        (B, N, P).
    """
    ops = keras.ops
    _, number, height, width = maps.shape
    pixels = ops.reshape(ops.transpose(maps, (0, 2, 3, 1)), (-1, height * width, number))
    found = sum(
        rows_of(pixels, index) * ops.expand_dims(weight, 2)
        for index, weight in corners(points, (height, width))
    )
    return ops.transpose(found, (0, 2, 1))


def at_own_points(maps: Tensor, points: Tensor) -> Any:
    """Returns what each map has at points of its own.

    Args:
        maps: floating (B, N, H, W).
        points: (B, N, P, 2).

    Returns:
        (B, N, P).
    """
    ops = keras.ops
    _, number, height, width = maps.shape
    pixels = ops.reshape(maps, (-1, number, height * width))
    return sum(
        ops.take_along_axis(pixels, index, axis=2) * weight
        for index, weight in corners(points, (height, width))
    )
