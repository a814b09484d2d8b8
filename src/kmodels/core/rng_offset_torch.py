"""Random numbers that differ between processes, drawn from seeds that are the same in all.

The seeds are state of the model: saved, restored and compared like weights. So which process draws
counts when it draws, and not in the state.
"""

from typing import Any

import keras
import torch

# Odd and large: far from the number of calls, which Keras adds to the seed.
_STRIDE = 0x9E3779B1
_offset = 0
_kept: list[Any] = []


def draw_as(shard: int) -> None:
    """Makes every `SeedGenerator` of this process draw as part `shard` of the data; 0 as alone."""
    global _offset
    _offset = shard * _STRIDE % (1 << 31)
    if _offset and not _kept:
        # Layers of Keras and of the user draw there; nothing else can be told who draws.
        _kept.append(keras.random.SeedGenerator.next)
        keras.random.SeedGenerator.next = _next
    elif not _offset and _kept:
        keras.random.SeedGenerator.next = _kept.pop()


def apart(state: torch.Tensor) -> torch.Tensor:
    """The state of a seed as this process draws from it.

    Args:
        state: (2,) integers, a copy, which is changed.
    """
    if _offset:
        state[0] += _offset
    return state


def _next(generator: Any, ordered: bool = True) -> torch.Tensor:
    return apart(_kept[0](generator, ordered))
