"""Random numbers that differ between processes, drawn from seeds that are the same in all.

The seeds are state of the model: saved, restored and compared like weights. The process that draws
therefore matters only when it draws, and not in the state.
"""

import torch

from kmodels.core import keras_internals

# Odd and large: far from the number of calls, which Keras adds to the seed.
_STRIDE = 0x9E3779B1
_offset = 0


def draw_as(shard: int) -> None:
    """Makes every `SeedGenerator` of this process draw as part `shard` of the data; 0 as alone."""
    global _offset
    _offset = shard * _STRIDE % (1 << 31)
    keras_internals.change_draws(apart if _offset else None)


def apart(state: torch.Tensor) -> torch.Tensor:
    """Returns the state of a seed as this process draws from it.

    Args:
        state: (2,) integers, a copy, which is changed.
    """
    if _offset:
        state[0] += _offset
    return state


def words_apart(words: tuple[int, int]) -> tuple[int, int]:
    """Returns the same of a state that was read: its two words."""
    return words[0] + _offset, words[1]
