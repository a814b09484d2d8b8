"""The state of other callbacks, such as EarlyStopping's best value and patience.

Keras' callbacks have no way to say it, so it is what training changed among their plain attributes.
Settings do not change, so those of the resumed run hold.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint.state import Arrays
from kmodels.core import keras_internals

_ARRAY = "__array__"
# Shows what is on the screen; its counts belong to one process.
_LEFT_OUT = (keras.callbacks.ProgbarLogger,)


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
        """Puts back what `capture` gave; callbacks that are not there any more are left out."""
        for name, changed in described.items():
            if (callback := self._named.get(name)) is None:
                continue
            for attribute, value in changed.items():
                setattr(callback, attribute, _decode(value, arrays))
            keras_internals.preserve_monitor(callback, list(changed))


def _plain(callback: Any) -> dict[str, Any]:
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
