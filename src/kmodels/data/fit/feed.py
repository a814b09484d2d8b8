"""Batches on their way into steps: made ahead where that pays, their waits counted.

`InstrumentedData` is what any data in `fit` does for that, `DatasetAdapter` a PyDataset that does.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.data.fit.data_wait import DataWaitTimer
from kmodels.data.fit.device_put import device_put
from kmodels.data.fit.prefetch import Ahead

ENVIRONMENT = "KMODELS_PREFETCH"


class PassesBackend(Protocol):
    """A backend with a pipeline of its own, tf.data, which makes and sends batches ahead."""

    def keeps_pipeline(self, model: keras.Model | None) -> bool:
        """Returns whether batches for this model go through that pipeline."""
        ...

    def Passes(self, begin: Callable[[], Iterator[Any]]) -> Iterable[Any]:
        """Makes what Keras takes for a data set; `begin` is called once an epoch."""
        ...


_passes = backend_module("kmodels.data.fit.passes", PassesBackend, optional=True)


def keeps_pipeline(model: keras.Model | None) -> bool:
    """Returns whether batches for this model go through tf.data, which makes them ahead."""
    return _passes is not None and _passes.keeps_pipeline(model)


def passes(begin: Callable[[], Iterator[Any]]) -> Any:
    """Returns what TensorFlow's steps take for a data set: `begin` is called once an epoch."""
    assert _passes is not None  # the steps of TensorFlow alone ask for it
    return _passes.Passes(begin)


def batches_ahead() -> int:
    """Returns how many batches a thread makes ahead and puts on the device; 0 for no thread.

    Raises:
        InputError: where the environment says something else than a number.
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


class InstrumentedData:
    """Hands batches to the steps of Keras, and counts how long those wait.

    Attributes:
        clock: how long steps waited.
        error: what the data raised, which some backends wrap in errors of their own.
        model: whose `fit`, `evaluate` or `predict` it was handed to last, if that is known.
        taken: batches of this pass that were handed out; None where only the backend knows.
    """

    def __init__(self, clock: DataWaitTimer):
        self.clock = clock
        self.error: Exception | None = None
        self.model: Any = None
        self.taken: int | None = None
        self._ahead: Ahead | None = None
        self._begun = False

    def begin(self) -> None:
        """Begins to make batches ahead, as the model is built and steps follow.

        Not before: so many that nobody takes would be made as there is time for, and draw as many
        random numbers.
        """
        self._begun = True
        self.close()

    def close(self) -> None:
        """Ends the thread that makes batches ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def end(self) -> None:
        """Ends the thread, whatever has ended the passes."""
        self.close()

    def feed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Returns batches as the step, or the pipeline in front of it, asks for them."""
        piped = keeps_pipeline(self.model)
        made = self._made(batches, piped)
        return made if piped else self._taken(made)

    def _made(self, batches: Iterable[Any], piped: bool) -> Iterator[Any]:
        self.clock.begin_pass(piped)
        try:
            iterator = iter(batches)
            while True:
                begun, cpu = perf_counter(), time.thread_time()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                check_batch(self.model, batch)
                self.clock.made(perf_counter() - begun, time.thread_time() - cpu)
                yield batch
        except Exception as error:
            self.error = error
            raise

    def _taken(self, made: Iterator[Any]) -> Iterator[Any]:
        count, ahead = batches_ahead() if self._begun else 0, None
        if count:
            self.close()
            ahead = self._ahead = Ahead(made, count, device_put.placer())
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
                yield batch
        finally:
            if ahead is not None:
                ahead.close()


def _take(made: Iterator[Any], busy: Callable[[], bool] | None) -> tuple[Any, float]:
    begun = perf_counter()
    batch = next(made)
    waited = perf_counter() - begun
    # Where the device ran dry in between, when it did is not known: all of it counts then.
    return batch, 0.0 if busy is not None and busy() else waited


class DatasetAdapter(InstrumentedData, keras_internals.PyDatasetBatches):
    """Hands a PyDataset to Keras, with its waits counted.

    Args:
        dataset: ours or a user's. Where it has `handed_out`, it is told how many batches were.
        class_weight: as in `keras.Model.fit`.
        clock: by default one that knows the workers of the data set.
    """

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        class_weight: dict[int, float] | None = None,
        clock: DataWaitTimer | None = None,
    ):
        InstrumentedData.__init__(self, clock or DataWaitTimer(*workers_of(dataset)))
        keras_internals.PyDatasetBatches.__init__(self, dataset, class_weight=class_weight)
        self._tracked: Any = None

    def track(self, wrap: Callable[[Any, Callable[[Any], Iterator[Any]], bool], Any]) -> Any:
        """Has all passes from here on go through another object, and returns it.

        Args:
            wrap: called with the data, what begins a pass over it, and whether a pass asks for
                batches by their number.
        """
        own = super().raw
        self._tracked = wrap(self.py_dataset, lambda _: iter(own()), True)
        return self._tracked

    def raw(self) -> Iterable[Any]:
        """Returns one pass over the batches."""
        return super().raw() if self._tracked is None else iter(self._tracked)

    def handed(self) -> Iterator[Any]:
        """Returns one pass over the batches, as `feed` gives them."""
        return self.feed(self.raw())

    def get_tf_dataset(self) -> Any:
        """Returns Keras' dataset, or passes over batches without tf.data."""
        if keeps_pipeline(self.model):
            return super().get_tf_dataset()
        return passes(self.handed)

    def on_epoch_end(self) -> None:
        """Tells the dataset that the epoch has ended, and how many batches were taken."""
        if self.taken is not None and hasattr(self.py_dataset, "handed_out"):
            # It has counted what was asked of it, which may be ahead.
            self.py_dataset.handed_out = self.taken
        super().on_epoch_end()

    def set_epoch(self, epoch: int) -> None:
        """Tells the data which epoch comes next."""
        if hasattr(self.py_dataset, "set_epoch"):
            self.py_dataset.set_epoch(epoch)


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
