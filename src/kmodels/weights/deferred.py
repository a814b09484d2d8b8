"""Weights that are filled when their model lies in parts, so that no device ever holds them all.

An engine that cuts models switches this on. `from_preset` then checks the file and makes the model
without values; what fills it waits here until the engine calls `fill`.
"""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError

_WAITING = "_fill_weights"
_on = False
# Whether any model of this process was left to wait.
used = False


def switch(on: bool) -> None:
    """Sets whether models that are loaded from now on wait for their values."""
    global _on
    _on = on


def active() -> bool:
    """Returns whether they wait."""
    return _on


def leave(model: keras.Model, fill: Callable[[], Any]) -> None:
    """Keeps what fills a model for `fill`."""
    global used
    used = True
    vars(model)[_WAITING] = fill


def fill(model: keras.Model) -> None:
    """Gives all variables of a model, and of models in it, the values that they wait for."""
    for layer in keras_internals.sublayers(model):
        if (waiting := vars(layer).pop(_WAITING, None)) is not None:
            waiting()


def check(model: keras.Model, what: str) -> None:
    """Raises `InputError` where a model waits for its weights.

    Args:
        model: any.
        what: is asked of it, for the message.
    """
    if any(_WAITING in vars(layer) for layer in keras_internals.sublayers(model)):
        raise InputError(
            f"{what} found a model that waits for its weights, since it is to lie in parts; call "
            "plan.prepare(model) first"
        )
