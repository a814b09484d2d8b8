"""Random initial weights that are equal on every backend.

Keras draws initial weights with the backend's generator, so one seed gives other weights on JAX
than on torch. Here each variable's numbers come from NumPy's Philox generator, keyed by the seed of
`keras.utils.set_random_seed`, the variable's path, and how many variables of that path were made
since the seed was set. The numbers depend neither on the backend nor on the order in which layers
are built, a program gives the same numbers each time, and no two models in it are copies of each
other.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.types import InitializerLike

Draw = Callable[[np.random.Generator, Sequence[int]], np.ndarray]


@cache
def _unseeded() -> int:
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


def generator(path: str, seed: int | None = None, number: int = 0) -> np.random.Generator:
    """Returns the stream of one variable: Philox keyed by (seed, path, number)."""
    seed = _unseeded() if seed is None else seed
    key = f"{seed}/{path}#{number}" if number else f"{seed}/{path}"
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def next_generator(path: str) -> np.random.Generator:
    """Returns the stream of the next variable that has this path, under the seed in force."""
    return generator(path, keras_internals.random_seed(), keras_internals.count_since_seed(path))


class Keyed(keras.initializers.Initializer):
    """Draws the numbers of the one variable that is made with it."""

    def __init__(self, draw: Draw, path: str):
        self.draw = draw
        self.path = path
        # Chosen now: a variable may be drawn long after it was made.
        self.seed = keras_internals.random_seed()
        self.number = keras_internals.count_since_seed(path)

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> Any:
        """Returns the first values."""
        dtype = keras.backend.standardize_dtype(dtype)
        return keras.ops.convert_to_tensor(self.values(shape, "float32"), dtype=dtype)

    def values(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Returns the first values, on the host."""
        rng = generator(self.path, self.seed, self.number)
        return self.draw(rng, tuple(shape)).astype("float32").astype(dtype)


def keyed(initializer: InitializerLike, path: str) -> Any:
    """Returns the initializer of the variable at this path; None for Keras' default.

    Those of Keras without a seed become draws from the variable's own stream.
    """
    initializer = keras.initializers.get(initializer or "glorot_uniform")
    draw = _draw(initializer)
    return initializer if draw is None else Keyed(draw, path)


def _draw(initializer: Any) -> Draw | None:
    """Returns the distribution of a Keras initializer without a seed, or None."""
    known = keras.initializers
    if not type(initializer).__module__.startswith("keras."):
        return None
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if config.get("seed") is not None:
        return None
    match initializer:
        case known.Zeros():
            return zeros
        case known.Ones():
            return ones
        case known.Constant(value=int() | float() as value):
            return constant(value)
        case known.VarianceScaling(input_axes=None, output_axes=None):
            return variance_scaling(initializer.scale, initializer.mode, initializer.distribution)
        case known.TruncatedNormal():
            return truncated_normal(initializer.stddev, initializer.mean)
        case known.RandomNormal():
            return normal(initializer.stddev, initializer.mean)
        case known.RandomUniform():
            return uniform(initializer.minval, initializer.maxval)
    return None


def zeros(_: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Returns all zeros."""
    return np.zeros(shape, "float32")


def ones(_: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Returns all ones."""
    return np.ones(shape, "float32")


def constant(value: float) -> Draw:
    """Returns all `value`."""
    return lambda _, shape: np.full(shape, value, "float32")


def uniform(low: float, high: float) -> Draw:
    """Draws uniformly between two values."""
    return lambda rng, shape: rng.random(shape, "float32") * (high - low) + low


def variance_scaling(scale: float, mode: str, distribution: str) -> Draw:
    """Keras' `VarianceScaling`: variance `scale` over the fan that `mode` names.

    The last two axes are (in, out); axes before them are a window of a convolution.
    """

    def draw(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        window = math.prod(shape[:-2])
        fan_in, fan_out = window * shape[-2 if shape[1:] else -1], window * shape[-1]
        fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
        variance = scale / max(1.0, fans[mode])
        if distribution == "uniform":
            limit = math.sqrt(3.0 * variance)
            return rng.random(shape, "float32") * (2 * limit) - limit
        if distribution == "untruncated_normal":
            return rng.standard_normal(shape, "float32") * math.sqrt(variance)
        return truncated_normal(math.sqrt(variance) / TRUNCATED_DEVIATION)(rng, shape)

    return draw


def normal(stddev: float = 0.02, mean: float = 0.0) -> Draw:
    """Draws from a normal distribution of deviation `stddev`."""
    return lambda rng, shape: rng.standard_normal(shape, "float32") * np.float32(stddev) + mean


# Deviation of a standard normal distribution whose values beyond two are drawn again.
TRUNCATED_DEVIATION = 0.87962566103423978


def truncated_normal(stddev: float = 0.02, mean: float = 0.0) -> Draw:
    """Draws as `normal` does, and values beyond two deviations again."""

    def draw(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        values = rng.standard_normal(shape, "float32")
        while (far := np.abs(values) > 2.0).any():
            values[far] = rng.standard_normal(int(far.sum()), "float32")
        return values * np.float32(stddev) + mean

    return draw
