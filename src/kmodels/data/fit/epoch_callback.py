"""FollowEpoch: what the data and its clock are told while Keras trains."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.data.fit.feed import InstrumentedData


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
        held_out: Any = None,
        steps_per_epoch: int | None = None,
        say: Callable[[str], object] | None = None,
    ):
        super().__init__()
        self._data = data
        self._held_out = held_out
        self._tells = steps_per_epoch is None
        self._say = say
        self._clock = data.clock if isinstance(data, InstrumentedData) else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Before the first batch is asked for."""
        self._speak()
        if self._tells and hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        if self._clock is not None:
            self._clock.begin_epoch()

    # Keras calls hooks at the end of a batch beside the training, as long as none has to be waited
    # for; this one it calls in time, and hands it no logs that would have to be fetched.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Before a step."""
        if self._clock is not None:
            self._clock.steps(batch)
            if batch == 0:
                self._data.look()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Before a step of evaluate."""
        data = self._data if self._held_out is None else self._held_out
        if batch == 0 and isinstance(data, InstrumentedData):
            data.look()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """After validation."""
        if self._clock is not None:
            self._clock.end_epoch()

    def on_train_begin(self, logs: Any = None) -> None:
        """After Keras has read batches to build the model."""
        if self._clock is not None:
            self._clock.model = self.model
        _begin(self._data)

    def on_train_end(self, logs: Any = None) -> None:
        """After the last epoch."""
        self._speak()

    def on_test_begin(self, logs: Any = None) -> None:
        """Before evaluate, inside of fit or not."""
        if self._clock is not None:
            self._clock.end_epoch()
        _begin(self._data if self._held_out is None else self._held_out)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Before predict."""
        _begin(self._data)

    def _speak(self) -> None:
        # After Keras' own line, which stands when the epoch is over.
        line = None if self._clock is None or self._say is None else self._clock.line()
        if line is not None:
            self._say(line)  # type: ignore[misc]


def _begin(data: Any) -> None:
    if isinstance(data, InstrumentedData):
        data.begin()
