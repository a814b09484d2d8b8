"""The parts of Keras' own `fit` that it does not tell its callbacks, and a monitor's best."""

import sys
from collections.abc import Iterable
from typing import Any

import keras

from kmodels.core.keras_internals.trainer import RunningFit


def fit_of_hook(callback: keras.callbacks.Callback) -> RunningFit:
    """Returns the `fit` of Keras in whose `on_train_begin` a callback calls this.

    This serves a `keras.Model` of the user's own, whose `fit` is Keras'; ours tells its callbacks.
    Keras tells a callback its model and a few numbers. The list that it is in, and what counts the
    steps, are local variables of `fit`; no callback and no method of the model is given both, and
    no attribute holds them. Both are read where Keras has them: from the function that
    called the hook, and from the `fit` that called that one.
    """
    frame = sys._getframe(1)
    # The hook of a subclass may have called that of its base.
    while frame.f_locals.get("self") is callback and frame.f_back is not None:
        frame = frame.f_back
    called_by: Any = frame.f_locals.get("self")
    fit = frame.f_back
    if not isinstance(called_by, keras.callbacks.CallbackList) or fit is None:
        return RunningFit([callback])
    return RunningFit(list(called_by.callbacks), fit.f_locals.get("epoch_iterator"), fit.f_code)


def preserve_monitor(callback: keras.callbacks.Callback, attributes: Iterable[str]) -> None:
    """Keeps what a callback that watches a number has found, when it first looks at that number.

    It settles then what "better" means, and starts its best again or turns the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        kept = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(kept)

    callback._set_monitor_op = settle_and_keep
