"""Weights that are filled after their model was sharded, so that no device ever holds them all.

An engine that shards models switches this on. `from_preset` then checks the file and makes the
model without values, and leaves a function here that fills it when the engine calls `fill`.
"""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError

_WAITING = "_fill_weights"
_on = False
# True if any model of this process was left to wait.
used = False


def switch(on: bool) -> None:
    """Sets if models that are loaded from now on wait for their values."""
    global _on
    _on = on


def active() -> bool:
    """Returns True if models wait for their values."""
    return _on


def leave(model: keras.Model, fill: Callable[[], Any]) -> None:
    """Keeps the function that fills a model."""
    global used
    used = True
    vars(model)[_WAITING] = fill


def fill(model: keras.Model) -> None:
    """Fills the variables of a model, and of models in it, that wait for their values."""
    for layer in keras_internals.sublayers(model):
        if (waiting := vars(layer).pop(_WAITING, None)) is not None:
            waiting()


def check(model: keras.Model, what: str) -> None:
    """Raises `InputError` for the operation `what` if a model waits for its weights."""
    if any(_WAITING in vars(layer) for layer in keras_internals.sublayers(model)):
        raise InputError(
            f"{what} found a model that waits for its weights, since it is to lie in parts; call "
            "plan.prepare(model) first"
        )
