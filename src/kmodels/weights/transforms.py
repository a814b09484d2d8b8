"""Changes of layout between a file and a model, each with its inverse."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Transform:
    """A change of layout and its inverse; both only move values, so there and back is bit-equal.

    Args:
        forward: from the layout of the file to that of the model.
        inverse: from the layout of the model to that of the file.
    """

    forward: Change
    inverse: Change


identity = Transform(lambda x: x, lambda x: x)

transpose = Transform(np.transpose, np.transpose)
"""Linear weights of PyTorch (out, in) <-> kernels (in, out)."""


def _each(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, 1, 2)


transpose_each = Transform(_each, _each)
"""Linear weights of many experts in one (E, out, in) <-> kernels (E, in, out)."""


def reshape(source: tuple[int, ...], target: tuple[int, ...]) -> Transform:
    """Merged or split axes, such as heads: (D, N, H) <-> (D, N * H)."""
    return Transform(lambda x: np.reshape(x, target), lambda x: np.reshape(x, source))


def leading_axes(number: int) -> Transform:
    """Serves files that leave out axes of length 1 in front: (D,) <-> (1, 1, D) with 2 of them."""
    return Transform(
        lambda x: np.reshape(x, (1,) * number + x.shape), lambda x: np.reshape(x, x.shape[number:])
    )


def patch_kernel(patch: int, channels: int) -> Transform:
    """Convolution (D, C, p, p) <-> patch projection (p * p * C, D), rows as (row, column, channel).

    Args:
        patch: side of the square patches, in pixels.
        channels: channels of the image.
    """
    rows = patch * patch * channels

    def forward(x: np.ndarray) -> np.ndarray:
        return np.transpose(x, (2, 3, 1, 0)).reshape(rows, -1)

    def inverse(x: np.ndarray) -> np.ndarray:
        return np.transpose(x.reshape(patch, patch, channels, -1), (3, 2, 0, 1))

    return Transform(forward, inverse)


def prepend_zeros(rows: int) -> Transform:
    """Serves files that keep rows of zeros in front: (1, rows + P, D) <-> (1, P, D)."""
    return Transform(
        lambda x: x[:, rows:],
        lambda x: np.concatenate([np.zeros_like(x[:, :1]).repeat(rows, 1), x], axis=1),
    )


def source_shape(shapes: list[tuple[int, ...]], transform: Transform, axis: int) -> tuple[int, ...]:
    """Returns the shape in the file of a tensor that becomes variables of these shapes.

    Args:
        shapes: shapes of the variables; several where the file keeps them fused along `axis`.
        transform: transform of each part.
        axis: along which the file joins the parts.
    """
    # A view of a single zero has any shape and costs nothing, so the transform itself can be asked.
    parts = [transform.inverse(np.broadcast_to(np.int8(0), shape)).shape for shape in shapes]
    joined = list(parts[0])
    if len(parts) > 1:
        joined[axis] = sum(part[axis] for part in parts)
    return tuple(joined)


def split_points(shapes: list[tuple[int, ...]], transform: Transform, axis: int) -> list[int]:
    """Returns where to cut the file's tensor along `axis` to get one part per variable."""
    sizes = [source_shape([shape], transform, axis)[axis] for shape in shapes]
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


def parameters(shape: tuple[int, ...]) -> int:
    """Returns number of values in an array of this shape."""
    return math.prod(shape)
