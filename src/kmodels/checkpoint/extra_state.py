"""The state of a run outside of its variables: generators, learning rates, other callbacks.

Hooks of callbacks are called again where a run is resumed within an epoch. So random generators and
learning rates are put back to what they were when the epoch began, and after that to what they were
when the state was saved.

Keras' callbacks, such as EarlyStopping with its best value and patience, have no way to say their
state. So it is what training changed among their plain attributes. Settings do not change, and
those of the resumed run hold.
"""

import copy
import random
from collections.abc import Container, Iterable, Mapping
from typing import Any, Protocol

import keras
import numpy as np

from kmodels.checkpoint.state import Arrays, host_values, put, slots, whole
from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.data.pipeline import prefetch

_RATE, _SLOT = "rate", "learning_rate"
_ARRAY = "__array__"
# Shows what is on the screen; its counts belong to one process.
_LEFT_OUT = (keras.callbacks.ProgbarLogger,)


class RngBackend(Protocol):
    """Random generators that a backend has beside those of Keras."""

    def capture(self) -> Arrays:
        """Returns their states by name."""
        ...

    def restore(self, states: Mapping[str, np.ndarray]) -> None:
        """Puts back what `capture` gave, where it is among these states."""
        ...


_native = backend_module("kmodels.checkpoint.extra_state", RngBackend, optional=True)


def capture_generators() -> Arrays:
    """Returns the states of Python's generator, NumPy's global one, Keras' and the backend's."""
    if prefetch.running:
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
    if prefetch.running:
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


def capture(optimizer: keras.Optimizer) -> Arrays:
    """Returns generators and rates; a schedule's rate is none that a callback could change."""
    return capture_generators() | capture_rates(optimizer)


def is_as_now(held: Mapping[str, np.ndarray]) -> bool:
    """Returns whether the generators of Python and NumPy are as `capture` found them."""
    now = capture_generators()
    names = [name for name in now if name.partition("_")[0] in ("python", "numpy")]
    return all(np.array_equal(now[name], held[name]) for name in names)


def capture_rates(optimizer: keras.Optimizer) -> Arrays:
    """Returns the learning rates alone, where they are numbers."""
    return whole(_rates(optimizer))


def restore(optimizer: keras.Optimizer, held: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture` gave."""
    restore_generators(held)
    restore_rates(optimizer, held)


def restore_rates(optimizer: keras.Optimizer, held: Mapping[str, np.ndarray]) -> None:
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


def _rates(optimizer: keras.Optimizer) -> dict[str, Any]:
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


class CallbackStates:
    """The callbacks of one `fit`, and how they were before it.

    Args:
        callbacks: without the one that saves them. One with a true `saves_itself` is left out.
    """

    def __init__(self, callbacks: Iterable[Any]):
        kept = [
            callback
            for callback in callbacks
            if not isinstance(callback, _LEFT_OUT) and not getattr(callback, "saves_itself", False)
        ]
        self._named: dict[str, Any] = {}
        for callback in kept:
            kind = type(callback).__name__
            number = sum(name.startswith(f"{kind}#") for name in self._named)
            self._named[f"{kind}#{number}"] = callback
        self._before = {name: _plain(callback) for name, callback in self._named.items()}

    def capture(self, arrays: Arrays) -> dict[str, dict[str, Any]]:
        """Returns what changed, by callback and attribute.

        Args:
            arrays: takes the arrays, by a name that stands in their place.
        """
        return {
            name: {
                attribute: _encode(value, f"callbacks/{name}/{attribute}", arrays)
                for attribute, value in _plain(callback).items()
                if not _same(self._before[name].get(attribute, _ARRAY), value)
            }
            for name, callback in self._named.items()
        }

    def restore(self, described: Mapping[str, Mapping[str, Any]], arrays: Arrays) -> None:
        """Puts back what `capture` gave; callbacks that no longer exist are left out."""
        for name, changed in described.items():
            if (callback := self._named.get(name)) is None:
                continue
            for attribute, value in changed.items():
                setattr(callback, attribute, _decode(value, arrays))
            if hasattr(callback, "monitor"):
                keras_internals.preserve_monitor(callback, list(changed))


def _plain(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if name not in ("params", "_params") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiubV"
    return value is None or isinstance(value, bool | int | float | str | np.number)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return type(one) is type(other) and one == other


def _encode(value: Any, name: str, arrays: Arrays) -> Any:
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, list | tuple):
        return [_encode(part, f"{name}/{number}", arrays) for number, part in enumerate(value)]
    if isinstance(value, dict):
        return {key: _encode(part, f"{name}/{key}", arrays) for key, part in value.items()}
    return value.item() if isinstance(value, np.number) else value


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_decode(part, arrays) for part in value]
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _decode(part, arrays) for key, part in value.items()}
    return value
