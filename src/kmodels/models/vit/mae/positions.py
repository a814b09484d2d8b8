"""The fixed positions of MAE."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError

TEMPERATURE = 10000.0


def sines(grid: tuple[int, int], width: int, prefix: int = 0) -> np.ndarray:
    """Returns sines and cosines of the column and of the row of each patch.

    Args:
        grid: (rows, columns) of patches.
        width: width of the tokens, a multiple of four.
        prefix: tokens in front of the patches, whose rows are zeros.

    Returns:
        float32 (prefix + rows * columns, width): sines of the column, its cosines, sines of the
        row, its cosines, in the order of MAE's published weights.

    Raises:
        InputError: for a width that four does not divide.
    """
    if width % 4:
        raise InputError(f"a width of {width} has no fixed positions; give a multiple of 4")
    frequencies = TEMPERATURE ** (-np.arange(width // 4) / (width // 4))
    row, column = (axis.reshape(-1, 1) * frequencies for axis in np.indices(grid))
    parts = [np.sin(column), np.cos(column), np.sin(row), np.cos(row)]
    return np.pad(np.concatenate(parts, axis=1), ((prefix, 0), (0, 0))).astype("float32")


class Sines(keras.initializers.Initializer):
    """Draws nothing: gives `sines` for a variable (1, prefix + rows * columns, width).

    Args:
        grid: see `sines`, like the other.
        prefix: see there.
    """

    def __init__(self, grid: Sequence[int], prefix: int):
        self.grid = (int(grid[0]), int(grid[1]))
        self.prefix = prefix

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Returns the table."""
        table = sines(self.grid, shape[-1], self.prefix)
        return keras.ops.convert_to_tensor(table[None], dtype=dtype or keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {"grid": list(self.grid), "prefix": self.prefix}
