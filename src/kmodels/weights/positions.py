"""Position embeddings for another image size, computed like the origin of the weights.

Resizing is linear and separable, so it is one matrix per axis, made in float64 with NumPy: the same
on each backend, and independent of it.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kmodels.core.errors import InputError
from kmodels.weights.tensors import LazyArray

Method = Literal["bicubic", "bicubic_antialias", "bilinear", "bilinear_antialias"]
Grid = tuple[int, int]


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Returns Keys' kernel (Keys 1981, eq. 15) with parameter `a`."""
    x = np.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(distance), 0.0)


def resize_matrix(old: int, new: int, method: Method) -> np.ndarray:
    """Returns the weights that make `new` samples of `old` ones along an axis.

    Args:
        old: number of samples.
        new: number of samples wanted.
        method: "bicubic", as Hugging Face (a = -0.75, no antialiasing, edges repeated);
            "bicubic_antialias", as timm (a = -0.5, the kernel widened when shrinking and cut at the
            edges, as Pillow does); "bilinear", as timm on `.npz` files (no antialiasing);
            "bilinear_antialias", as SigLIP 2 with native aspect ratio. All methods take samples at
            pixel centres.

    Returns:
        float64 (new, old); each row sums to 1.
    """
    scale = old / new
    matrix = np.zeros((new, old))
    rows = np.arange(new)
    centre = (rows + 0.5) * scale
    if not method.endswith("_antialias"):
        position = centre - 0.5
        if method == "bilinear":
            position = np.clip(position, 0.0, old - 1)
        start = np.floor(position)
        for tap in range(-1, 3):
            distance = position - (start + tap)
            if method == "bilinear":
                weight = _triangle(distance)
            else:
                weight = _cubic(distance, -0.75)
            column = np.clip(start + tap, 0, old - 1).astype(int)
            np.add.at(matrix, (rows, column), weight)
        return matrix
    stretch = max(scale, 1.0)
    columns = np.arange(old)
    distance = (columns[None] + 0.5 - centre[:, None]) / stretch
    if method == "bilinear_antialias":
        matrix, reach = _triangle(distance), stretch
    else:
        matrix, reach = _cubic(distance, -0.5), 2.0 * stretch
    # torch and Pillow round the kernel's ends to whole samples before they normalise.
    first = np.floor(np.maximum(centre - reach + 0.5, 0.0))
    last = np.floor(np.minimum(centre + reach + 0.5, old))
    matrix *= (columns[None] >= first[:, None]) & (columns[None] < last[:, None])
    return matrix / matrix.sum(axis=1, keepdims=True)


def resize_positions(
    table: np.ndarray, old: Grid, new: Grid, prefix: int, method: Method
) -> np.ndarray:
    """Returns a position embedding for another grid of patches.

    Args:
        table: (1, prefix + old rows * old columns, D).
        old: rows and columns of the table.
        new: rows and columns wanted.
        prefix: leading rows that belong to no patch and are not resized.
        method: method of `resize_matrix`.

    Returns:
        (1, prefix + new rows * new columns, D), computed in float64, in the table's dtype.
    """
    width = table.shape[-1]
    grid = table[0, prefix:].astype("float64").reshape(*old, width)
    down, across = (resize_matrix(o, n, method) for o, n in zip(old, new, strict=True))
    grid = np.einsum("ij,jkd->ikd", down, grid)
    grid = np.einsum("ij,kjd->kid", across, grid).reshape(1, -1, width)
    return np.concatenate([table[:, :prefix], grid.astype(table.dtype)], axis=1)


def fit_positions(table: LazyArray, old: Grid, new: Grid, prefix: int, method: Method) -> LazyArray:
    """Returns a lazy `resize_positions`, or the table itself for the same grid."""
    if old == new:
        return table
    shape = (1, prefix + new[0] * new[1], table.shape[-1])
    return table.map(shape, lambda x: resize_positions(x, old, new, prefix, method))


def table_grid(name: str, rows: int, fronts: Sequence[int], grids: Sequence[Grid]) -> Grid:
    """Returns the grid of a table of positions.

    Args:
        name: name of the table, for the error.
        rows: rows of the table.
        fronts: possible numbers of leading rows that belong to no patch, the usual one first.
        grids: known grids; one that fits the rows takes precedence over a square.

    Raises:
        InputError: if no grid fits, and the rows without the usual leading ones are no square.
    """
    for grid in grids:
        if rows - grid[0] * grid[1] in fronts:
            return grid
    patches = rows - fronts[0]
    side = math.isqrt(max(patches, 0))
    if not side or side * side != patches:
        front = f" and {fronts[0]} in front" if fronts[0] else ""
        choice = ", or position_over_prefix=False if none are in front" if 0 in fronts[1:] else ""
        raise InputError(
            f"{name} has {rows} rows, which is no square{front}; give "
            f"image_shape=(height, width, channels) of the file{choice}"
        )
    return side, side
