"""The seeds of Keras: the process's own, and how often something was drawn since it was set."""

from collections import Counter
from typing import Any

from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils import rng_utils


class _Seed(int):
    """The seed of `set_random_seed`, with what was counted since.

    Setting a seed, the same one too, puts a plain int in its place, and with that ends the count.
    """

    counts: Counter[str]


_counts_without_seed: Counter[str] = Counter()


def random_seed() -> int | None:
    """The seed given to `keras.utils.set_random_seed`, or None where none was."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def count_since_seed(what: str) -> int:
    """How many times this function was called with `what` before, since the seed was set.

    Where no seed was set it counts from the beginning of the process.
    """
    seed = rng_utils.get_random_seed()
    if seed is None:
        counts = _counts_without_seed
    else:
        if not isinstance(seed, _Seed):
            seed = _Seed(seed)
            seed.counts = Counter()
            global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
        counts = seed.counts
    counts[what] += 1
    return counts[what] - 1


def global_seed() -> Any:
    """The state variable of the seed that Keras takes where none is given; None before its use."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state
