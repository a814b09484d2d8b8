"""One call of `fit`, `evaluate` or `predict`: its arguments, and how callbacks follow it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Any, Self

import keras


class Method(StrEnum):
    """Names the methods of `keras.Model` that take any data."""

    FIT = "fit"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, eq=False)
class FitRequest:
    """Holds all arguments of one call of `fit`, `evaluate` or `predict`.

    A field that the caller left out holds Keras' default, and a field that the method does not have
    holds the default given here, so code reads fields and never asks what was passed.

        request = FitRequest.of(Method.FIT, x=x, y=y, epochs=3)
        keras.Model.fit(model, **request.changed(batch_size=8).keywords())

    Attributes:
        method: what was called.
        x: data, see `kmodels.data.as_dataset`.
        y: labels, where x is arrays.
        sample_weight: weights, where x is arrays.
        batch_size: samples per batch, where the data has no batches of its own.
        steps: batches of an epoch: `steps_per_epoch` of `fit`, `steps` of the other two.
        shuffle: whether samples come in a new order in each epoch; "batch" as in Keras.
        class_weight: weight of the samples of each class.
        validation_data: what `fit` evaluates on.
        validation_split: share of arrays that is held out for that.
        validation_batch_size: samples per batch of it; `batch_size` by default.
        validation_steps: batches of it.
        callbacks: a list of callbacks, one of them, or a `keras.callbacks.CallbackList`.
        verbose: what Keras prints.
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
    def of(cls, method: Method, **given: Any) -> Self:
        """Returns the request that a call of the method makes.

        Args:
            method: method of `keras.Model`.
            **given: its arguments by Keras' names; all others are at Keras' defaults.
        """
        values = {name: default for name, (_, default) in _parameters(method).items()} | given
        known = {held: values.pop(name) for name, (held, _) in _parameters(method).items() if held}
        return cls(method, **known, more=values)

    def changed(self, **values: Any) -> Self:
        """Returns a request with other values in these fields."""
        return replace(self, **values)

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments by Keras' names, for Keras' own method."""
        parameters = _parameters(self.method).items()
        return {
            **{name: getattr(self, held) for name, (held, _) in parameters if held},
            **self.more,
        }


@cache
def _parameters(method: Method) -> dict[str, tuple[str | None, Any]]:
    """Returns, by Keras' name, the field of each parameter (None for `more`) and its default."""
    held = {part.name for part in fields(FitRequest)}
    found = {}
    for name, parameter in inspect.signature(getattr(keras.Model, method)).parameters.items():
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            alias = "steps" if name == "steps_per_epoch" else name
            default = parameter.default
            found[name] = (
                alias if alias in held else None,
                None if default is parameter.empty else default,
            )
    return found


@dataclass
class RunningFit:
    """A call of `fit`, as far as a callback that resumes it has to know it.

    Args:
        callbacks: that it calls, in order.
        epochs: its batches, epoch by epoch; None in any other loop than that of kmodels.
    """

    callbacks: list[Any]
    epochs: Any = None


class FitCallback(keras.callbacks.Callback):
    """A callback that is told by kmodels' `fit` what it is in, as Keras' own tells nobody.

    Attributes:
        fit: the one that runs; None outside, and in a `fit` of Keras' own.
    """

    fit: RunningFit | None = None

    def go_on(self) -> None:
        """The epoch that has begun goes on where it was cut; its data is there."""

    def after_step(self) -> None:
        """All callbacks have had the end of a step."""

    def leave_fit(self) -> None:
        """The `fit` is over, also by an error, of which Keras tells no callback."""
        self.fit = None
