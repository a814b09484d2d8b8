"""The seeds of Keras: the process's own, and how often something was drawn since it was set."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
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
    """Returns the seed given to `keras.utils.set_random_seed`, or None where none was."""
    seed = rng_utils.get_random_seed()
    return None if seed is None else int(seed)


def count_since_seed(what: str) -> int:
    """Returns how many times this function was called with `what` before, since the seed was set.

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
    """Returns the state variable of Keras' global seed generator; None before its use."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


_next_of_keras: list[Any] = []


def change_draws(change: Callable[[Any], Any] | None) -> None:
    """Has what every `keras.random.SeedGenerator` gives for a draw go through a function.

    The method is replaced for the whole process, since nothing narrower sees all draws. Layers of
    Keras and of users make generators of their own, at any time, and Keras one for draws without a
    seed; none of them can be given another class, and Keras calls no hook where it draws. The
    state cannot be changed instead: it is saved and compared like weights.

    Args:
        change: takes the state of a draw, (2,) integers, and returns the one to draw from; None
            gives the method back.
    """
    generator: Any = keras.random.SeedGenerator
    if _next_of_keras:
        generator.next = _next_of_keras.pop()
    if change is None:
        return
    draw = generator.next
    _next_of_keras.append(draw)

    def changed(self: Any, ordered: bool = True) -> Any:
        return change(draw(self, ordered))

    generator.next = changed
