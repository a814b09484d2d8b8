"""Random numbers of a seed, without reading the seed from a device."""

from collections.abc import Sequence
from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module


class SeedsBackend(Protocol):
    """Draws of a backend on which Keras' own draws read the seed."""

    def uniform(self, shape: Sequence[Any], seed: Any, low: float, high: float, dtype: str) -> Any:
        """See `uniform` below."""
        ...


_native = backend_module("kmodels.core.seeds", SeedsBackend, optional=True)


def uniform(
    shape: Sequence[Any],
    seed: int | keras.random.SeedGenerator | None,
    low: float = 0.0,
    high: float = 1.0,
    dtype: str = "float32",
) -> Any:
    """Returns the numbers of `keras.random.uniform`."""
    if _native is not None:
        return _native.uniform(shape, seed, low, high, dtype)
    return keras.random.uniform(shape, low, high, dtype, seed)
