"""First weights that are the same on every backend.

Keras draws first weights with the backend's own generator, so one seed gives other weights on JAX
than on torch. Here each variable's numbers come from NumPy's Philox generator, keyed by the seed of
`keras.utils.set_random_seed` and the variable's path: they depend neither on the backend nor on the
order in which layers are built.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import keras
import numpy as np

from kmodels import compat

Draw = Callable[[np.random.Generator, Sequence[int]], np.ndarray]


@cache
def _unseeded() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


def generator(path: str, seed: int | None = None) -> np.random.Generator:
    """The stream of one variable: Philox keyed by (seed, path)."""
    seed = _unseeded() if seed is None else seed
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


class Keyed(keras.initializers.Initializer):
    """Draws the numbers of the one variable that has this path."""

    def __init__(self, draw: Draw, path: str):
        self.draw = draw
        self.path = path

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """The first values."""
        dtype = keras.backend.standardize_dtype(dtype)
        return keras.ops.convert_to_tensor(self.values(shape, "float32"), dtype=dtype)

    def values(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """The first values, on the host."""
        values = self.draw(generator(self.path, compat.random_seed()), tuple(shape))
        return values.astype("float32").astype(dtype)


def zeros(_: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """All zeros."""
    return np.zeros(shape, "float32")


def ones(_: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """All ones."""
    return np.ones(shape, "float32")


def constant(value: float) -> Draw:
    """All `value`."""
    return lambda _, shape: np.full(shape, value, "float32")


def glorot_uniform(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Uniform in ±sqrt(6 / (fan_in + fan_out)) for an (in, out) kernel (Glorot, Bengio 2010)."""
    limit = math.sqrt(6.0 / (shape[-2] + shape[-1]))
    return rng.random(shape, "float32") * (2 * limit) - limit


def lecun_normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Normal with deviation sqrt(1 / fan_in) for an (in, out) kernel."""
    return rng.standard_normal(shape, "float32") * math.sqrt(1.0 / shape[-2])


def normal(stddev: float = 0.02) -> Draw:
    """Normal with deviation `stddev`."""
    return lambda rng, shape: rng.standard_normal(shape, "float32") * np.float32(stddev)


def truncated_normal(stddev: float = 0.02) -> Draw:
    """Normal with deviation `stddev`, values beyond two deviations drawn again."""

    def draw(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        values = rng.standard_normal(shape, "float32")
        while (far := np.abs(values) > 2.0).any():
            values[far] = rng.standard_normal(int(far.sum()), "float32")
        return values * np.float32(stddev)

    return draw
