"""The arguments of a call of `fit`, `evaluate` or `predict`, and the base of its callbacks."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Self

import keras

from kmodels.core.errors import InputError, check_number, check_whole


class Method(StrEnum):
    """Methods of `keras.Model` that accept any data."""

    FIT = "fit"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, eq=False)
class FitRequest:
    """All arguments of one call of `fit`, `evaluate` or `predict`.

    Fields that the caller left out have Keras' defaults, and fields that the method does not have
    the defaults of this class.

        request = FitRequest.of(Method.FIT, x=x, y=y, epochs=3)
        keras.Model.fit(model, **request.changed(batch_size=8).keywords())

    Attributes:
        method: the method that was called.
        steps: batches of an epoch: `steps_per_epoch` of `fit`, `steps` of the other two.
        more: Keras' remaining keywords by name, such as epochs.
    """

    method: Method
    x: Any = None
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    steps: int | None = None
    shuffle: bool | str = False
    class_weight: dict[int, float] | None = None
    validation_data: Any = None
    validation_split: float = 0.0
    validation_batch_size: int | None = None
    validation_steps: int | None = None
    callbacks: Any = None
    verbose: Any = "auto"
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, method: Method, **arguments: Any) -> Self:
        """Returns the request of a call with arguments by Keras' names; others have its defaults.

        Raises `InputError` for a number, a choice or a callback that no call can have.
        """
        values = {name: default for name, (_, default) in _parameters(method).items()} | arguments
        known = {part: values.pop(name) for name, (part, _) in _parameters(method).items() if part}
        request = cls(method, **known, more=values)
        request._check()
        return request

    def _check(self) -> None:
        steps = "steps_per_epoch" if self.method == Method.FIT else "steps"
        for name, value in (
            ("batch_size", self.batch_size),
            (steps, self.steps),
            ("validation_batch_size", self.validation_batch_size),
            ("validation_steps", self.validation_steps),
        ):
            if value is not None:
                check_whole(name, value)
        for name in ("epochs", "initial_epoch"):
            check_whole(name, self.more.get(name, 0), 0)
        check_number("validation_split", self.validation_split or 0.0, least=0, below=1)
        frequency = self.more.get("validation_freq", 1)
        if not isinstance(frequency, int | list) or frequency == []:
            raise InputError(
                f"validation_freq is {frequency!r}; give a number of epochs, or a list of them"
            )
        for epochs in frequency if isinstance(frequency, list) else [frequency]:
            check_whole("validation_freq", epochs)
        if self.verbose not in ("auto", 0, 1, 2):
            raise InputError(f"verbose is {self.verbose!r}; give 'auto', 0, 1 or 2")
        if self.shuffle not in (True, False, "batch"):
            raise InputError(f"shuffle is {self.shuffle!r}; give True, False or 'batch'")
        for callback in keras.tree.flatten(self.callbacks):
            if callback is not None and not isinstance(callback, keras.callbacks.Callback):
                raise InputError(f"callbacks has {callback!r}; give a keras.callbacks.Callback")
        if self.validation_data is None and not self.validation_split:
            idle = {
                "validation_batch_size": self.validation_batch_size,
                "validation_steps": self.validation_steps,
                "validation_freq": None if (f := self.more.get("validation_freq", 1)) == 1 else f,
            }
            if names := [name for name, value in idle.items() if value is not None]:
                warnings.warn(
                    f"{' and '.join(names)} without validation_data or validation_split; nothing "
                    "is evaluated",
                    stacklevel=4,
                )

    def changed(self, **values: Any) -> Self:
        """Returns a copy with other values in these fields."""
        return replace(self, **values)

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments by Keras' names, for Keras' own method."""
        parameters = _parameters(self.method).items()
        return {
            **{name: getattr(self, part) for name, (part, _) in parameters if part},
            **self.more,
        }


@cache
def _parameters(method: Method) -> dict[str, tuple[str | None, Any]]:
    """Returns, by Keras' name, the field of each parameter (None for `more`) and its default."""
    names = {part.name for part in fields(FitRequest)}
    parameters = {}
    for name, parameter in inspect.signature(getattr(keras.Model, method)).parameters.items():
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            field_name = "steps" if name == "steps_per_epoch" else name
            default = None if parameter.default is parameter.empty else parameter.default
            parameters[name] = field_name if field_name in names else None, default
    return parameters


@dataclass
class RunningFit:
    """A running `fit`, for callbacks that resume it.

    It has its callbacks in order, and its batches epoch by epoch, None outside of kmodels' loop.
    """

    callbacks: list[Any]
    epochs: Any = None


class FitCallback(keras.callbacks.Callback):
    """A callback that gets the running fit in `self.fit`; None outside, and in Keras' own."""

    fit: RunningFit | None = None

    def go_on(self) -> None:
        """Called after the beginning of an epoch that continues an interrupted one."""

    def after_step(self) -> None:
        """Called after a step, when all callbacks have been called."""

    def leave_fit(self) -> None:
        """Called at the end of `fit`, also after an error."""
        self.fit = None
