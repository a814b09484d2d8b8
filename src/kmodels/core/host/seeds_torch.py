"""Words of seeds on the host, for draws by torch's own generators, which take a number of Python.

A seed is state of the model on the device, and reading it waits for all that was given to the
device before. Each draw adds one to its second word, so what was read once is known from then on,
as long as nobody else writes into the tensor: torch counts changes in place, and a value that is
put in its place is another tensor. Then the seed is read again.
"""

import threading
from typing import NamedTuple

import keras
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kmodels.core import keras_internals, rng_offset_torch
from kmodels.core.framework_internals import internals_torch

WORD = 0xFFFFFFFF


class _Known(NamedTuple):
    """The words of a state, and the number of changes after which it held them."""

    version: int
    words: tuple[int, int]


# By the tensor that holds the state: copies of a model, values in a `StatelessScope` and what
# comes after `clear_session` are other tensors.
_known = WeakTensorKeyDictionary()
_lock = threading.Lock()


def take(seed: keras.random.SeedGenerator) -> tuple[int, int]:
    """Returns the words that this process draws from, as `seed.next()` does; the seed moves on."""
    with _lock:
        state = _state(seed.state)
        words = _words(state)
        if words is None:
            first, second = state.tolist()
            words = first, second
        _advance(seed.state, state)
        _note(_state(seed.state), (words[0], words[1] + 1))
    return rng_offset_torch.words_apart(words)


def mixed(*words: int) -> int:
    """Returns 64 bits of a generator's seed, to which each word comes through.

    torch reads 32 bits of a seed on a CPU, so all words have to reach each of them.
    """
    sequence = np.random.SeedSequence([word & WORD for word in words])
    return int(sequence.generate_state(1, np.uint64)[0])


class Held(NamedTuple):
    """A copy of a seed's state, and its words where they are known."""

    state: torch.Tensor
    words: tuple[int, int] | None


def hold(variable: keras.Variable) -> Held:
    """Returns the state that a seed has now, for `give_back`."""
    if torch.compiler.is_compiling():  # compiled code draws without the host
        return Held(_state(variable).clone(), None)
    with _lock:
        state = _state(variable)
        return Held(state.clone(), _words(state))


def give_back(variable: keras.Variable, held: Held) -> None:
    """Gives a seed a state that it had, and keeps in mind what its words are."""
    if torch.compiler.is_compiling():
        variable.assign(held.state)
        return
    with _lock:
        variable.assign(held.state)
        if held.words is not None:
            _note(_state(variable), held.words)


def _state(variable: keras.Variable) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return variable.value
    return keras_internals.value_of(variable, cast=False)


def _words(state: torch.Tensor) -> tuple[int, int] | None:
    known = _known.get(state)
    if known is None or known.version != internals_torch.version_of(state):
        return None
    return known.words


def _note(state: torch.Tensor, words: tuple[int, int]) -> None:
    version = internals_torch.version_of(state)
    if version >= 0:  # changes of a tensor of inference mode are not counted
        _known[state] = _Known(version, words)


def _advance(variable: keras.Variable, state: torch.Tensor) -> None:
    """Adds one to the second word on the device; a number that is sent there would wait for it."""
    if type(variable) is keras.Variable and not keras_internals.in_stateless_scope():
        with torch.no_grad():
            state[1:].add_(1)
        return
    moved = state.clone()
    moved[1:].add_(1)
    variable.assign(moved)
