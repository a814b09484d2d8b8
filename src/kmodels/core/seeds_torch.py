"""Seeds of torch: their words on the host, and an offset by which processes draw apart.

torch's own generators take a Python number as seed. A seed is state of the model on the device, and
reading it waits for all work on the device. Each draw adds one to its second word, so after one
read the words are known, see `runtime_torch.known`.

Seeds are the same in all processes: saved, restored and compared like weights. The offset of a
process is added only when it draws, and is not in the state.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import torch

from kmodels.core import keras_internals, runtime_torch

WORD = 0xFFFFFFFF
# Odd and large: far from the number of calls, which Keras adds to the seed.
_STRIDE = 0x9E3779B1
_offset = 0


def draw_as(shard: int) -> None:
    """Makes every `SeedGenerator` of this process draw as process `shard`; 0 takes that back."""
    global _offset
    _offset = shard * _STRIDE % (1 << 31)
    keras_internals.change_draws(apart if _offset else None)


def apart(state: torch.Tensor) -> torch.Tensor:
    """Returns the state from which this process draws.

    Args:
        state: (2,) integers, a copy, which is changed.
    """
    if _offset:
        state[0] += _offset
    return state


_lock = threading.Lock()


def take(seed: keras.random.SeedGenerator) -> tuple[int, int]:
    """Returns the words that this process draws from, as `seed.next()` does; the seed moves on."""
    with _lock:
        state = _state(seed.state)
        first, second = runtime_torch.known(state) or state.tolist()
        _advance(seed.state, state)
        runtime_torch.note(_state(seed.state), (first, second + 1))
    return first + _offset, second


def uniform(shape: Sequence[Any], seed: Any, low: float, high: float, dtype: str) -> Any:
    """Returns the numbers of `keras.random.uniform`, which reads the seed at each call."""
    device = keras_internals.device()
    known = isinstance(seed, keras.random.SeedGenerator) and device != "meta"
    if not known or torch.compiler.is_compiling():
        return keras.random.uniform(shape, low, high, dtype, seed)
    generator = torch.Generator(device).manual_seed(sum(take(seed)) & WORD)
    drawn = torch.rand(shape, generator=generator, dtype=getattr(torch, dtype), device=device)
    return (high - low) * drawn + low


def mixed(*words: int) -> int:
    """Returns a generator's seed of 64 bits.

    torch reads 32 bits of a seed on a CPU, so each word changes all of them.
    """
    sequence = np.random.SeedSequence([word & WORD for word in words])
    return int(sequence.generate_state(1, np.uint64)[0])


class Held(NamedTuple):
    """A copy of a seed's state, and its words if they are known."""

    state: torch.Tensor
    words: tuple[int, ...] | None


def hold(variable: keras.Variable) -> Held:
    """Returns the current state of a seed, for `give_back`."""
    if torch.compiler.is_compiling():  # compiled code draws without the host
        return Held(_state(variable).clone(), None)
    with _lock:
        state = _state(variable)
        return Held(state.clone(), runtime_torch.known(state))


def give_back(variable: keras.Variable, taken: Held) -> None:
    """Restores a state of a seed, and its words."""
    if torch.compiler.is_compiling():
        variable.assign(taken.state)
        return
    with _lock:
        variable.assign(taken.state)
        if taken.words is not None:
            runtime_torch.note(_state(variable), taken.words)


def _state(variable: keras.Variable) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return variable.value
    return keras_internals.value_of(variable, cast=False)


def _advance(variable: keras.Variable, state: torch.Tensor) -> None:
    """Adds one to the second word on the device, without sending a number there."""
    if type(variable) is keras.Variable and not keras_internals.in_stateless_scope():
        with torch.no_grad():
            state[1:].add_(1)
        return
    moved = state.clone()
    moved[1:].add_(1)
    variable.assign(moved)
