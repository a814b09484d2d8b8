"""Goes through the batches that a resumed epoch has seen, without training on them."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from kmodels.core import keras_internals


class Replay:
    """Takes the place of a model's step until the batches of the checkpoint are gone through.

    So whatever the data is, and wherever its order comes from, the next batch is the one that would
    have come.

    Args:
        model: inside `fit`, its step made.
        batches: to go through.
        logs: names of the logs of a step.
        first: called with the first batch.
    """

    def __init__(
        self,
        model: Any,
        batches: int,
        logs: Iterable[str],
        first: Callable[[Any], object],
    ):
        self._model, self._left, self._names = model, batches, tuple(logs)
        self._first = first
        self._step = model.train_function
        self._begun = False
        keras_internals.forget_step(model)
        model.train_function = self

    def __call__(self, *arguments: Any) -> Any:
        """Takes what Keras gives a step: batches or an iterator, on JAX a state in front of it."""
        held = arguments[-1]
        batches = held if isinstance(held, list) else _take(held, self._model.steps_per_execution)
        if not self._begun:
            self._begun = True
            self._first(batches[0])
        self._left -= self._model.steps_per_execution
        if self._left <= 0:
            self.end()
        logs = dict.fromkeys(self._names, 0.0)
        return (logs, arguments[0]) if len(arguments) == 2 else logs

    def end(self) -> None:
        """Gives the model its step back."""
        self._model.train_function = self._step


def _take(iterator: Any, count: int) -> list[Any]:
    return list(itertools.islice(iterator, count))
