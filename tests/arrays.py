"""Arrays of any backend as NumPy's."""

from typing import Any

import keras
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    """The values of a tensor or a variable.

    Keras' `convert_to_numpy` warns on JAX when it is handed a variable.
    """
    return keras.ops.convert_to_numpy(x.value if isinstance(x, keras.Variable) else x)


def read_npz(path: Any) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file, which is closed again."""
    with np.load(path) as held:
        return dict(held)
