"""Pipeline: any data as batches on the device, pass after pass, and how long steps wait for them.

A source yields batches on the host. Over a mesh they are cut to the rows of this process; then
preprocessing and class weights are applied, and batches are prefetched and placed on the device.
"""

import os
import time
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import Preprocess, prepared, with_class_weights
from kmodels.data.pipeline.device_put import device_put
from kmodels.data.pipeline.indexed import IndexedBatches, Numbered
from kmodels.data.pipeline.position import Position, Source
from kmodels.data.pipeline.prefetch import Ahead
from kmodels.data.pipeline.shard import Shard
from kmodels.data.pipeline.wait import DataWaitTimer

ENVIRONMENT = "KMODELS_PREFETCH"


class Pipeline(keras_internals.DataAdapter):
    """Batches of one call of `fit`, `evaluate` or `predict`; Keras' own methods accept it as x.

    Args:
        source: yields batches on the host.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy.
        class_weight: weight of the samples of each class.
        shard: cuts batches to the rows of this process; None for all rows.

    Attributes:
        clock: measures how long steps wait.
        model: the model that uses the batches, if it is known.
        taken: number of batches of this pass that were returned.
    """

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess | None = None,
        class_weight: dict[int, float] | None = None,
        shard: Shard | None = None,
    ):
        self.source, self.preprocess = source, preprocess
        self.class_weight, self.shard = class_weight, shard
        self.clock = DataWaitTimer(*workers_of(source.data), source.faster)
        self._position: Position | None = None
        self.model: Any = None
        self.taken = 0
        self._ahead: Ahead | None = None
        self._started = self._checked = False

    def give_to(self, model: keras.Model) -> None:
        """Sets the model that takes the batches, and checks arrays before the first step.

        Batches of other data, and those that a preprocessor makes, are checked one by one.
        """
        self.model, data = model, self.source.data
        if (whole := getattr(data, "whole", None)) is not None:
            check_batch(model, whole)
            self._checked = data.preprocess is self.preprocess is None

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, or None if it is not known."""
        return (self.source if self.shard is None else self.shard).num_batches

    @property
    def position(self) -> Position:
        """The position, for checkpoints; states are recorded from the first access on."""
        if self._position is None:
            self._position = Position(self.source)
        return self._position

    @property
    def samples(self) -> int:
        """Number of samples of all processes in an epoch, over a mesh."""
        assert self.shard is not None
        return self.shard.samples

    def preprocess_by(self, preprocess: Preprocess | None) -> None:
        """Sets the preprocessor of a model, unless the data has one.

        Args:
            preprocess: see `kmodels.data.as_dataset`.
        """
        data = self.source.data
        if isinstance(data, IndexedBatches):
            data.preprocess = data.preprocess or preprocess
        elif not hasattr(data, "part"):
            self.preprocess = preprocess

    def start(self) -> None:
        """Starts to prefetch, as the model is built and steps follow.

        Not earlier: batches that no step uses would draw random numbers.
        """
        self._started = True
        self.close()
        self.source.start()

    def close(self) -> None:
        """Ends the thread that prefetches."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def end(self) -> None:
        """Ends the thread and the recording of positions, at the end of a call."""
        self.close()
        self._position = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch of the data."""
        self.source.set_epoch(epoch)

    def on_epoch_begin(self) -> None:
        """Calls the method of the data."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the method of the data with the number of batches that were used."""
        taken, self.taken = self.taken, 0
        if self._position is not None:
            taken, self._position.skipped = taken + self._position.skipped, 0
        self.source.on_epoch_end(taken, self.num_batches)

    def raw(self) -> Iterator[tuple]:
        """Begins a pass over preprocessed batches on the host."""
        begun = (self.source if self._position is None else self._position).begin()
        batches = map(self.source.as_batch, begun)
        if self.shard is not None:
            return self.shard.of(batches, self._prepared)
        return map(self._prepared, batches)

    def batches(self, placed: bool = True) -> Iterator[tuple]:
        """Begins a pass over the batches for the steps.

        Args:
            placed: places them on the devices; False leaves them on the host.
        """
        device_put.begin_pass()
        # Workers of the data start with its first batch, unless the pass was begun by `go_to`.
        sought = self.raw() if self._position is not None and self._position.sought else None
        return self._taken(self._made(sought), placed)

    def _prepared(self, batch: tuple) -> tuple:
        if self.preprocess is not None or not isinstance(self.source, Numbered):
            batch = prepared(batch, self.preprocess)
        return with_class_weights(batch, self.class_weight)

    def _made(self, sought: Iterator[tuple] | None) -> Iterator[tuple]:
        batches = self.raw() if sought is None else sought
        while True:
            begun, cpu = perf_counter(), time.thread_time()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if not self._checked:
                check_batch(self.model, batch)
            self.clock.made(perf_counter() - begun, time.thread_time() - cpu)
            yield batch

    def _taken(self, made: Iterator[tuple], placed: bool) -> Iterator[tuple]:
        count, ahead = batches_ahead() if self._started and placed else 0, None
        place = device_put.placer(self.model, count > 0) if placed else lambda batch: batch
        if count:
            self.close()
            ahead = self._ahead = Ahead(made, count, place)
        self.taken = 0
        try:
            while True:
                busy = device_put.busy(self.clock.last_output())
                try:
                    batch, waited = _take(made, busy) if ahead is None else ahead.take(busy)
                except StopIteration:
                    return
                self.clock.waits(waited)
                self.taken += 1
                yield place(batch) if ahead is None else batch
        finally:
            if ahead is not None:
                ahead.close()

    # Keras' own `fit` calls the one of its backend.

    def get_numpy_iterator(self) -> Iterator[tuple]:
        """Begins a pass over the batches on the host."""
        return self.batches(placed=False)

    def get_jax_iterator(self) -> Any:
        """Returns the batches for Keras' own `fit`."""
        return device_put.for_keras(self.batches)

    get_torch_dataloader = get_tf_dataset = get_jax_iterator

    batch_size = has_partial_batch = partial_batch_size = None


def _take(made: Iterator[Any], busy: Callable[[], bool] | None) -> tuple[Any, float]:
    begun = perf_counter()
    batch = next(made)
    waited = perf_counter() - begun
    # If the device became idle meanwhile, it is not known when, so the whole time counts.
    return batch, 0.0 if busy is not None and busy() else waited


def batches_ahead() -> int:
    """Returns the number of batches to prefetch to the device in a thread; 0 for no thread.

    Raises:
        InputError: if the environment variable is not a number.
    """
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return device_put.ahead()
    if not text.isdecimal():
        raise InputError(f"{ENVIRONMENT} is {text!r}; give a number of batches, 0 for none")
    return int(text)


def check_batch(model: keras.Model | None, batch: Any) -> None:
    """Raises `InputError` for token ids and labels that the model does not have.

    Args:
        model: a model that may have `check_token_ids` and `check_labels`.
        batch: the inputs, or a tuple of inputs, labels and weights.
    """
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    for part, name in zip(parts, ("check_token_ids", "check_labels"), strict=False):
        if (check := getattr(model, name, None)) is not None:
            check(part)


def workers_of(data: Any) -> tuple[int, str | None]:
    """Returns the number of worker processes of a loader, and the name of that argument or None."""
    for name in ("worker_count", "num_workers"):
        if isinstance(count := getattr(data, name, None), int):
            return count, "workers" if name == "worker_count" else name
    if hasattr(data, "loader"):
        return workers_of(data.loader)
    if getattr(data, "use_multiprocessing", False) or getattr(data, "workers", 1) > 1:
        return data.workers, "workers"
    return 0, None
