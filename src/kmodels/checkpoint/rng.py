"""The RNG states and the learning rates that a checkpoint keeps.

Hooks of callbacks are called again where a run is resumed within an epoch, so these are put back to
what they were when the epoch began, and after that to what they were when the state was saved.
"""

import random
from collections.abc import Container, Mapping
from typing import Any, Protocol

import numpy as np

from kmodels.checkpoint.state import Arrays, host_values, put, slots, whole
from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.data.fit import prefetch

_RATE, _SLOT = "rate", "learning_rate"


class RngBackend(Protocol):
    """Random generators that a backend has beside those of Keras."""

    def capture(self) -> Arrays:
        """Returns their states by name."""
        ...

    def restore(self, states: Mapping[str, np.ndarray]) -> None:
        """Puts back what `capture` gave, where it is among these states."""
        ...


_native = backend_module("kmodels.checkpoint.rng", RngBackend, optional=True)


def capture_generators() -> Arrays:
    """Returns the states of Python's generator, NumPy's global one, Keras' and the backend's."""
    prefetch.settle()
    _, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.array([*key, position, has_gauss], np.uint32),
        "numpy_gauss": np.array([cached], np.float64),
    }
    if (seed := keras_internals.global_seed()) is not None:
        found["keras"] = np.array(host_values(seed))
    return found | ({} if _native is None else _native.capture())


def restore_generators(states: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture_generators` gave; another backend's generator is left out."""
    prefetch.settle()
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = states["numpy"].tolist()
    cached = float(states["numpy_gauss"][0])
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, cached))
    if "keras" in states and (seed := keras_internals.global_seed()) is not None:
        put(seed, states["keras"])
    if _native is not None:
        _native.restore(states)


def capture(optimizer: Any) -> Arrays:
    """Both as they are; a schedule's learning rate is none that a callback could change."""
    return capture_generators() | capture_rates(optimizer)


def is_as_now(held: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the generators of Python and NumPy are as `capture` found them."""
    now = capture_generators()
    names = [name for name in now if name.partition("_")[0] in ("python", "numpy")]
    return all(np.array_equal(now[name], held[name]) for name in names)


def capture_rates(optimizer: Any) -> Arrays:
    """Returns the learning rates alone, where they are numbers."""
    return whole(_rates(optimizer))


def restore(optimizer: Any, held: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture` gave."""
    restore_generators(held)
    restore_rates(optimizer, held)


def restore_rates(optimizer: Any, held: Mapping[str, np.ndarray]) -> None:
    """Puts back those learning rates that are held."""
    for name, variable in _rates(optimizer).items():
        if name in held:
            put(variable, held[name])


def without_rate(held: Arrays) -> Arrays:
    """Returns the random generators alone."""
    return {name: values for name, values in held.items() if not _is(name, _RATE)}


def of_slots(held: Arrays, slots: Container[str]) -> Arrays:
    """Returns those learning rates whose slots are named."""
    return {name: values for name, values in held.items() if _slot(name) in slots}


def rates(held: Arrays) -> Arrays:
    """Returns the learning rates alone, by the names that they have among the slots."""
    return {_slot(name): values for name, values in held.items() if _is(name, _RATE)}


def _rates(optimizer: Any) -> dict[str, Any]:
    return {
        name.removesuffix(_SLOT) + _RATE: variable
        for name, variable in slots(optimizer).items()
        if _is(name, _SLOT)
    }


def _slot(rate: str) -> str:
    return rate.removesuffix(_RATE) + _SLOT


def _is(name: str, last: str) -> bool:
    """Returns whether it is that, of the only optimizer or of an objective's."""
    return name.rpartition("/")[2] == last
