"""The callbacks of a running `fit`."""

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from keras.src.callbacks.callback_list import CallbackList

_CALLBACK_LIST: Any = CallbackList


def fit_callbacks(callback: Any) -> tuple[list[Any], CodeType | None]:
    """Returns the callbacks that the running `fit` calls, and the code of that `fit`.

    Call it inside a hook of the callback. Keras tells a callback its model and the numbers of the
    `fit`, never the list that it is in: the list is a local variable of `fit`, the model does not
    hold it, and of the model's methods only `evaluate` is given it, after an epoch. So it is looked
    up on the stack, also for a user's own `keras.Model`, whose `fit` is none of ours.
    """
    if (frame := _frame_of_hook(callback)) is None:
        return [callback], None
    fit = frame.f_back
    return list(frame.f_locals["self"].callbacks), None if fit is None else fit.f_code


def _frame_of_hook(callback: Any) -> FrameType | None:
    """Returns where Keras' list of callbacks calls this one."""
    frame = sys._getframe(2)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, _CALLBACK_LIST) and callback in owner.callbacks:
            return frame
        frame = frame.f_back
    return None


def preserve_monitor(callback: Any, attributes: Iterable[str]) -> None:
    """Keeps what a callback that watches a number has found, when it first looks at that number.

    It settles then what "better" means, and starts its best anew or turns the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        kept = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(kept)

    callback._set_monitor_op = settle_and_keep


def local_of_fit(callback: Any, name: str) -> Any:
    """Returns what the running `fit` calls so; None outside.

    Call it inside a hook of the callback.
    """
    frame = _frame_of_hook(callback)
    fit = None if frame is None else frame.f_back
    return None if fit is None else fit.f_locals.get(name)
