"""Puts a function in front of the one by which Keras makes tensors of numbers and arrays."""

import sys
from collections.abc import Callable
from typing import Any

from keras.src import backend

# What was asked for, Keras' own function, and the one in its place.
_in_force: list[tuple[Callable[..., Any], Any, Any]] = []


def change_conversion(change: Callable[..., Any] | None) -> None:
    """Has what Keras' backend makes a tensor of go through a function first.

    The function is replaced for the whole process and in each module that imported it: layers,
    losses, metrics and optimizers of Keras and of users come to it by many names, and there is no
    hook in it.

    Args:
        change: takes Keras' own function, the value, and the dtype or None for the one that the
            value has, and returns a tensor, or None to have Keras make it; None gives Keras its own
            function back.
    """
    if _in_force:
        former, original, changed = _in_force[0]
        if former is change:
            return
        _in_force.clear()
        _replace(changed, original)
    if change is None:
        return
    original = backend.convert_to_tensor

    def changed(x: object, dtype: object = None, *args: object, **kwargs: object) -> Any:
        made = change(original, x, dtype)
        return original(x, dtype, *args, **kwargs) if made is None else made

    _replace(original, changed)
    _in_force.append((change, original, changed))


def device() -> Any:
    """Returns where Keras puts tensors in this thread, on the backend that has one such place."""
    return backend.core.get_device()


def _replace(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src") and vars(module).get("convert_to_tensor") is old:
            module.convert_to_tensor = new  # type: ignore[attr-defined]
