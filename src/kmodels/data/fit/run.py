"""One call of `fit`, `evaluate` or `predict` on any data, from its beginning to its end."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core.keras_internals import RunningFit
from kmodels.data.fit.adapters import prepare
from kmodels.data.fit.batches import Preprocess
from kmodels.data.fit.feed import InstrumentedData, check_batch
from kmodels.data.fit.request import FitRequest


def run(
    model: keras.Model,
    call: Callable[[keras.Model, FitRequest], Any],
    request: FitRequest,
    preprocess: Preprocess | None = None,
) -> Any:
    """Calls a method of the training loop on any data.

    An error of the data arrives as it was raised, and whatever ends the call, no thread is left.

    Args:
        model: compiled.
        call: takes the model, and the request with data as Keras' adapters have it.
        request: what it is asked for.
        preprocess: see `kmodels.data.as_dataset`.

    Returns:
        What the method returns.
    """
    # Arrays that are handed on as they are pass no feed.
    check_batch(model, (request.x, request.y))
    if isinstance(request.validation_data, tuple):
        check_batch(model, request.validation_data)
    request = prepare(request, preprocess)
    feeds = [
        data for data in (request.x, request.validation_data) if isinstance(data, InstrumentedData)
    ]
    for feed in feeds:
        feed.model = model
    try:
        return call(model, request)
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

    def after_step(self) -> None:
        """All callbacks have had the end of a step."""

    def leave_fit(self) -> None:
        """The `fit` is over, also by an error, of which Keras tells no callback."""
        self.fit = None
