"""Points that both sides of a comparison draw."""

import numpy as np


def points(number: int) -> np.ndarray:
    """float32 (number, 2) from 0 to 1, others for another number."""
    return np.random.default_rng(number).random((number, 2)).astype("float32")
