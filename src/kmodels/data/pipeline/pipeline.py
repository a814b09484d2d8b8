"""Pipeline: any data as batches on the device, pass after pass, and how long steps wait for them.

A source gives batches on the host. Over a mesh they are cut to the rows of this process, then a
preprocessor and class weights are applied. They are made ahead where that pays, and put where the
step wants them.
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
    """Batches of one call of `fit`, `evaluate` or `predict`; Keras' own take it as x, too.

    Args:
        source: gives batches on the host.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy.
        class_weight: weight of the samples of each class.
        shard: cuts batches to the rows of this process; None for all rows.

    Attributes:
        clock: how long steps waited.
        model: whose method it was handed to last, if that is known.
        taken: batches of this pass that were handed out.
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
        """Notes the model that takes the batches, and checks arrays whole; others by batch."""
        self.model, data = model, self.source.data
        whole = getattr(data, "whole", None)
        self._checked = whole is not None and data.preprocess is self.preprocess is None
        if self._checked:
            check_batch(model, whole)

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, or None if that is not known."""
        return (self.source if self.shard is None else self.shard).num_batches

    @property
    def position(self) -> Position:
        """Where it stands, for a run that is saved; nothing is noted before somebody asks."""
        if self._position is None:
            self._position = Position(self.source)
        return self._position

    @property
    def samples(self) -> int:
        """Samples of all processes in an epoch, where each has its rows."""
        assert self.shard is not None
        return self.shard.samples

    def preprocess_by(self, preprocess: Preprocess | None) -> None:
        """Takes a model's preprocessor, unless the data has one, or is a loader that has its own.

        Args:
            preprocess: see `kmodels.data.as_dataset`.
        """
        data = self.source.data
        if isinstance(data, IndexedBatches):
            data.preprocess = data.preprocess or preprocess
        elif not hasattr(data, "part"):
            self.preprocess = preprocess

    def start(self) -> None:
        """Starts to make batches ahead, as the model is built and steps follow.

        Not before: so many that nobody takes would be made as there is time for, and draw as many
        random numbers.
        """
        self._started = True
        self.close()
        self.source.start()

    def close(self) -> None:
        """Ends the thread that makes batches ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def end(self) -> None:
        """Ends the thread, and notes positions no more, as the call that took the batches ends."""
        self.close()
        self._position = None

    def set_epoch(self, epoch: int) -> None:
        """Tells the data which epoch comes next."""
        self.source.set_epoch(epoch)

    def on_epoch_begin(self) -> None:
        """Tells the data that an epoch begins."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the data that an epoch has ended, and how many batches were taken."""
        taken, self.taken = self.taken, 0
        if self._position is not None:
            taken, self._position.skipped = taken + self._position.skipped, 0
        self.source.on_epoch_end(taken, self.num_batches)

    def raw(self) -> Iterator[tuple]:
        """Begins a pass over the batches on the host, as they are preprocessed."""
        begun = (self.source if self._position is None else self._position).begin()
        batches = map(self.source.as_batch, begun)
        if self.shard is not None:
            return self.shard.of(batches, self._prepared)
        return map(self._prepared, batches)

    def batches(self, placed: bool = True) -> Iterator[tuple]:
        """Begins a pass over the batches as steps take them.

        Args:
            placed: puts them on the devices; if False, they stay on the host.
        """
        device_put.begin_pass()
        # Workers start for a pass that something comes of, but a pass that was sought is this one.
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

    # Keras' own `fit` asks for the one of its backend.

    def get_numpy_iterator(self) -> Iterator[tuple]:
        """Begins a pass over the batches on the host."""
        return self.batches(placed=False)

    def get_jax_iterator(self) -> Any:
        """Returns the batches as Keras' own `fit` takes them."""
        return device_put.for_keras(self.batches)

    get_torch_dataloader = get_tf_dataset = get_jax_iterator

    batch_size = has_partial_batch = partial_batch_size = None


def _take(made: Iterator[Any], busy: Callable[[], bool] | None) -> tuple[Any, float]:
    begun = perf_counter()
    batch = next(made)
    waited = perf_counter() - begun
    # Where the device ran dry in between, when it did is not known: all of it counts then.
    return batch, 0.0 if busy is not None and busy() else waited


def batches_ahead() -> int:
    """Returns how many batches a thread makes ahead and puts on the device; 0 for no thread.

    Raises:
        InputError: if the environment says something else than a number.
    """
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return device_put.ahead()
    if not text.isdecimal():
        raise InputError(f"{ENVIRONMENT} is {text!r}; give a number of batches, 0 for none")
    return int(text)


def check_batch(model: keras.Model | None, batch: Any) -> None:
    """Raises `InputError` for token ids and labels in NumPy that the model has none of.

    Args:
        model: which may have `check_token_ids` and `check_labels`.
        batch: the inputs, or a tuple of inputs, labels and weights.
    """
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    for part, name in zip(parts, ("check_token_ids", "check_labels"), strict=False):
        if (check := getattr(model, name, None)) is not None:
            check(part)


def workers_of(data: Any) -> tuple[int, str | None]:
    """Returns how many processes make batches of it, and what their number is called there."""
    for name in ("worker_count", "num_workers"):
        if isinstance(count := getattr(data, name, None), int):
            return count, "workers" if name == "worker_count" else name
    if hasattr(data, "loader"):
        return workers_of(data.loader)
    if getattr(data, "use_multiprocessing", False) or getattr(data, "workers", 1) > 1:
        return data.workers, "workers"
    return 0, None
