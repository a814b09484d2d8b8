"""Dropout."""

import keras

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor


@op
def dropout(x: Tensor, rate: float, seed: keras.random.SeedGenerator | Tensor) -> Tensor:
    """Sets a share of the elements to zero and scales the others by `1 / (1 - rate)`.

    Shapes: any; the output has the input's.
    Dtypes: floating; the output has the input's.

    Args:
        x: the input.
        rate: share of elements set to zero, a Python float in [0, 1); 0 returns `x`.
        seed: `keras.random.SeedGenerator`, whose state moves on with each call.

    Raises:
        InputError: if the rate is outside [0, 1).

    Parity: `keras.random.dropout`; the expectation is `x`.
    Source: https://jmlr.org/papers/v15/srivastava14a.html
    """
    check_rate(rate)
    return keras.random.dropout(x, rate, seed=seed) if rate else x


def check_rate(rate: float) -> None:
    """Raises `InputError` if the rate is outside [0, 1)."""
    if not 0.0 <= rate < 1.0:
        raise InputError(f"dropout got rate {rate}; it must be in [0, 1).")
