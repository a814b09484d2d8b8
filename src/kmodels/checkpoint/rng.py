"""The random generators of the process, from which data may be shuffled or augmented."""

import random
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kmodels.checkpoint.state import Arrays, host_values, put
from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.data.fit import prefetch


class RngBackend(Protocol):
    """Random generators that a backend has beside those of Keras."""

    def capture(self) -> Arrays:
        """Returns their states by name."""
        ...

    def restore(self, states: Mapping[str, np.ndarray]) -> None:
        """Puts back what `capture` gave, where it is among these states."""
        ...


_native = backend_module("kmodels.checkpoint.rng", RngBackend, optional=True)


def capture() -> Arrays:
    """The states of Python's generator, NumPy's global one, Keras' and the backend's."""
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


def restore(states: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture` gave; another backend's generator is left out."""
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
