"""An epoch of a running `fit` that begins within its steps."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import keras

from kmodels.core.keras_internals.trainer import forget_step


def example(iterator: Any) -> Any:
    """Returns a batch of a running `fit`, or what tells its shapes and dtypes."""
    if (begin := getattr(iterator, "passes", None)) is not None:
        spec = getattr(begin, "element_spec", None)
        return next(begin()) if spec is None else spec
    batches = iterator._get_iterator()
    spec = getattr(batches, "element_spec", None)
    return next(iter(batches)) if spec is None else spec


def begin_within(
    iterator: Any,
    model: keras.Model,
    done: int,
    log_names: tuple[str, ...],
    place: Callable[[], bool],
    build: Callable[[Any], object],
    after: Callable[[], object],
) -> None:
    """Has the epoch that comes next begin within its steps, or `place` its data before the first.

    Keras tells callbacks of the last step that is done once more, with logs of zeros and nothing
    trained, and of the steps after it as always.

    Args:
        iterator: iterator of a `RunningFit`.
        model: inside `fit`, its step made.
        done: steps of the epoch that are done.
        log_names: names of the logs of a step.
        place: brings the data to the step that comes next, after all hooks of the epoch's begin;
            returns True where the batches of those that are done still have to be gone through.
        build: called with the first batch that is gone through.
        after: called before the first step that is trained.
    """
    whole = iterator._enumerate_iterator

    def steps() -> Iterator[Any]:
        del iterator._enumerate_iterator
        replayed = place()
        rest = whole()
        if not done:
            yield from rest
            return
        for begin, end, batches in rest:
            for number in range(iterator.steps_per_execution if replayed else 0):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if begin + number == 0:
                    build(batch)
            if end + 1 >= done:
                LastStep.again(model, log_names)
                yield begin, end, repeat(None)
                after()
                break
        yield from rest

    iterator._enumerate_iterator = steps


class LastStep:
    """Takes the place of a model's step once, so that callbacks receive a step that is done.

    Args:
        model: inside `fit`, its step made.
        log_names: names of the logs of a step.
    """

    def __init__(self, model: keras.Model, log_names: tuple[str, ...]):
        self._model, self._names, self._step = model, log_names, model.train_function

    @classmethod
    def again(cls, model: keras.Model, log_names: tuple[str, ...]) -> None:
        """Has the next step of the model be such a one."""
        forget_step(model)
        model.train_function = cls(model, log_names)

    @staticmethod
    def forget(model: keras.Model) -> None:
        """Gives the model its step back, where a `fit` was left before it came to that."""
        if isinstance(step := model.train_function, LastStep):
            model.train_function = step._step

    def __call__(self, *arguments: object) -> Any:
        """Takes what Keras gives a step: batches or an iterator, on JAX a state in front of it."""
        self.forget(self._model)
        logs = dict.fromkeys(self._names, 0.0)
        return (logs, arguments[0]) if len(arguments) == 2 else logs
