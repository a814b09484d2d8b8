"""One call of Keras' `fit`, `evaluate` or `predict` on any data, from its beginning to its end.

`run` hands Keras the data and lets go of it afterwards; `FollowEpoch` is what happens in between.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from kmodels.core.keras_internals import RunningFit, note_iterator
from kmodels.core.types import Data, Logs
from kmodels.data.fit.adapters import prepare
from kmodels.data.fit.batches import Preprocess
from kmodels.data.fit.data_wait import DataWaitTimer
from kmodels.data.fit.feed import DelegatingAdapter, InstrumentedData, check_batch
from kmodels.data.fit.native import Native
from kmodels.data.fit.request import FitRequest, Method
from kmodels.data.fit.stream import Stream


class RequestData(DelegatingAdapter):
    """Marks data as what Keras was handed for one call.

    Keras' `fit` gives it to `evaluate`, which so sees that nothing is left to prepare.

    Args:
        adapter: an `InstrumentedData`.
    """

    @property
    def clock(self) -> DataWaitTimer:
        """The clock of the data."""
        return self.adapter.clock


def run(
    model: keras.Model,
    call: Callable[..., Any],
    request: FitRequest,
    preprocess: Preprocess | None = None,
) -> Any:
    """Calls Keras' `fit`, `evaluate` or `predict` on any data.

    An error of the data arrives as it was raised, and whatever ends the call, no thread is left.

    Args:
        model: compiled.
        call: the model's method, which takes Keras' keywords.
        request: what it is asked for.
        preprocess: see `kmodels.data.as_dataset`.

    Returns:
        What the method returns.
    """
    # Arrays that Keras is handed as they are pass no feed.
    check_batch(model, (request.x, request.y))
    if isinstance(request.validation_data, tuple):
        check_batch(model, request.validation_data)
    request = follow(prepare(request, preprocess))
    feeds = [
        data for data in (request.x, request.validation_data) if isinstance(data, InstrumentedData)
    ]
    for feed in feeds:
        feed.model = model
    handed = request.changed(x=_handed(request.x), validation_data=_handed(request.validation_data))
    try:
        with _unwarned(feeds, request.steps), _telling(handed, model) as told:
            return call(**told.keywords())
    except Exception as error:
        for feed in feeds:
            # tf.data wraps it. What was made ahead may be wrong too, and not be the reason.
            if feed.error is not None and str(feed.error) in str(error):
                raise feed.error from None
        raise
    finally:
        for feed in feeds:
            feed.end()


class FitCallback(keras.callbacks.Callback):
    """A callback that is told by kmodels' `fit` what it is in, as Keras' own tells nobody.

    Attributes:
        fit: the one that runs; None outside, and in a `fit` of Keras' own.
    """

    fit: RunningFit | None = None

    def go_on(self) -> None:
        """The epoch that has begun goes on where it was cut; its data is there."""

    def leave_fit(self) -> None:
        """The `fit` is over, also by an error, of which Keras tells no callback."""
        self.fit = None


@contextmanager
def _telling(request: FitRequest, model: keras.Model) -> Iterator[FitRequest]:
    """Tells callbacks what they are in and, in the end, that it is over."""
    given = request.callbacks
    listed = isinstance(given, keras.callbacks.CallbackList)
    callbacks: list[Any] = given.callbacks if listed else keras.tree.flatten(given or [])
    told = [callback for callback in callbacks if isinstance(callback, FitCallback)]
    if not told or request.method is not Method.FIT:
        yield request
        return
    if not listed and not any(isinstance(c, keras.callbacks.History) for c in callbacks):
        callbacks.append(keras.callbacks.History())  # Keras would add one that nobody can see.
    fit = RunningFit(callbacks)
    for callback in told:
        callback.fit = fit
    try:
        with note_iterator(model, fit):
            yield request if listed else request.changed(callbacks=callbacks)
    finally:
        for callback in told:
            callback.leave_fit()


def follow(request: FitRequest) -> FitRequest:
    """Returns a prepared request whose callbacks tell its data what Keras is at."""
    if not isinstance(request.x, InstrumentedData):
        return request
    say = functools.partial(print, flush=True) if request.verbose else None
    last = FollowEpoch(request.x, request.validation_data, request.steps, say)
    given: Any = request.callbacks or []
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks.append(last)
        return request
    several = isinstance(given, list | tuple)
    return request.changed(callbacks=[*(given if several else [given]), last])


def _handed(data: Any) -> Any:
    return RequestData(data) if isinstance(data, InstrumentedData) else data


@contextmanager
def _unwarned(feeds: Sequence[InstrumentedData], steps: int | None) -> Iterator[None]:
    """Silences Keras' warning that data ended, where nobody had said how much there is."""
    if steps or not any(
        isinstance(feed, Native | Stream) and feed.num_batches is None for feed in feeds
    ):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield


class FollowEpoch(keras.callbacks.Callback):
    """Tells data which epoch it is in, also where training starts at a later one.

    Args:
        data: what is trained, evaluated or predicted on.
        held_out: what `fit` evaluates on.
        steps_per_epoch: where given, an epoch of `fit` is not one of the data, which then counts
            for itself.
        say: called with a line after an epoch in which steps waited for data.
    """

    def __init__(
        self,
        data: Any,
        held_out: Data = None,
        steps_per_epoch: int | None = None,
        say: Callable[[str], object] | None = None,
    ):
        super().__init__()
        self._data = data
        self._held_out = held_out
        self._tells = steps_per_epoch is None
        self._say = say
        self._clock = data.clock if isinstance(data, InstrumentedData) else None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Tells the data its epoch, before the first batch is asked for."""
        self._speak()
        if self._tells and hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        if self._clock is not None:
            self._clock.begin_epoch()

    # Keras calls hooks at the end of a batch beside the training, as long as none has to be waited
    # for; this one it calls in time, and hands it no logs that would have to be fetched.
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Notes that a step begins."""
        if self._clock is not None:
            self._clock.steps(batch)
            if batch == 0:
                self._data.look()

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Gets the first batch before a step of evaluate."""
        data = self._data if self._held_out is None else self._held_out
        if batch == 0 and isinstance(data, InstrumentedData):
            data.look()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Ends the counts of an epoch that had no validation."""
        if self._clock is not None:
            self._clock.end_epoch()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Lets batches be made ahead, once Keras has read some to build the model."""
        if self._clock is not None:
            self._clock.model = self.model
        _begin(self._data)

    def on_train_end(self, logs: Logs = None) -> None:
        """Prints the line of the last epoch."""
        self._speak()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Ends the counts of training, and lets batches to evaluate on be made ahead."""
        if self._clock is not None:
            self._clock.end_epoch()
        _begin(self._data if self._held_out is None else self._held_out)

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Lets batches be made ahead."""
        _begin(self._data)

    def _speak(self) -> None:
        # After Keras' own line, which stands when the epoch is over.
        line = None if self._clock is None or self._say is None else self._clock.line()
        if line is not None:
            self._say(line)  # type: ignore[misc]


def _begin(data: Any) -> None:
    if isinstance(data, InstrumentedData):
        data.begin()
