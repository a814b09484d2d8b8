"""Pipeline: any data as batches on the device, pass after pass, and how long steps wait for them.

A source yields batches on the host. Over a mesh they are cut to the rows of this process; then
preprocessing and class weights are applied, and batches are prefetched and placed on the device.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from time import perf_counter
from typing import Any

import keras
import numpy as np

from kmodels.core import environment, keras_internals
from kmodels.core.errors import InputError, pluralize
from kmodels.data.pipeline.arrays import (
    Preprocess,
    check_class_weight,
    prepared,
    with_class_weights,
)
from kmodels.data.pipeline.device_put import device_put
from kmodels.data.pipeline.indexed import IndexedBatches, Numbered
from kmodels.data.pipeline.position import Position, Source
from kmodels.data.pipeline.prefetch import Ahead
from kmodels.data.pipeline.shard import Shard

ENVIRONMENT = "KMODELS_PREFETCH"
CPU = 1  # DLPack's number of the host's memory.
# A smaller share, or less time in an epoch, is not worth a line.
SHOWN_SHARE, SHOWN_SECONDS = 0.05, 0.1


class Pipeline(keras_internals.DataAdapter):
    """Batches of one call of `fit`, `evaluate` or `predict`; Keras' own methods accept it as x.

    A source yields batches on the host, `shard` cuts them to the rows of this process, and they are
    preprocessed, in NumPy, as preprocess(x, y, sample_weight).

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
        self._rows = self._learned = 0

    def give_to(self, model: keras.Model) -> None:
        """Sets the model that takes the batches, and checks arrays before the first step.

        Batches of other data, and those that a preprocessor makes, are checked one by one.
        """
        self.model, data = model, self.source.data
        check_class_weight(model, self.class_weight)
        if (whole := getattr(data, "whole", None)) is not None:
            self._checked = data.preprocess is self.preprocess is None
            check_batch(model, whole, is_raw=not self._checked)

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

    @property
    def learned_tokens_per_row(self) -> float | None:
        """Mean number of tokens of a row that weigh more than 0, or None if rows have no tokens.

        Rows are counted as their batches are made, so every kind of data has this number.
        """
        return self._learned / self._rows if self._learned else None

    def preprocess_by(self, preprocess: Preprocess | None) -> None:
        """Sets the preprocessor of a model, unless the data has one."""
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
        self._scale_weights(getattr(self.model, "divisor", None) is None)
        self.source.start()

    def _scale_weights(self, scales: bool) -> None:
        """Sets if a loader of records scales its weights for a model that divides by positions."""
        if hasattr(self.source.data, "scales_weights"):
            self.source.data.scales_weights = scales

    def close(self) -> None:
        """Ends the thread that prefetches."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def end(self) -> None:
        """Ends the thread and the recording of positions, at the end of a call."""
        self.close()
        self._scale_weights(True)
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

    def batches(self, placed: bool = True, count: int | None = None) -> Iterator[tuple]:
        """Begins a pass over the batches for the steps, on the devices or on the host.

        `count` is the number of batches that are left in the pass, so that no more are asked for;
        None if it is not known.
        """
        device_put.begin_pass()
        # Workers of the data start with its first batch, unless the pass was begun by `go_to`.
        sought = self.raw() if self._position is not None and self._position.sought else None
        return self._taken(self._made(sought, count), placed)

    def _prepared(self, batch: tuple) -> tuple:
        if self.preprocess is not None or not isinstance(self.source, Numbered):
            batch = prepared(batch, self.preprocess)
        return with_class_weights(batch, self.class_weight)

    def _made(self, sought: Iterator[tuple] | None, count: int | None) -> Iterator[tuple]:
        batches = self.raw() if sought is None else sought
        # Asked for more than it has, torch's sampler draws from its generator. A thread that
        # prefetches would ask for that or not, depending on when the epoch ends.
        for _ in repeat(None) if count is None else range(count):
            begun, cpu = perf_counter(), time.thread_time()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if not self._checked:
                check_batch(self.model, batch)
            self.clock.made(perf_counter() - begun, time.thread_time() - cpu)
            self._count_tokens(batch)
            yield batch

    def _count_tokens(self, batch: tuple) -> None:
        """Counts the rows and the learned tokens of a batch with a weight (B, T) for each label."""
        if len(batch) < 3 or not isinstance(weights := in_host_memory(batch[2]), np.ndarray):
            return
        if weights.ndim == 2 and weights.shape == getattr(batch[1], "shape", None):
            self._rows += len(weights)
            self._learned += int(np.count_nonzero(weights))

    def _taken(self, batches: Iterator[tuple], placed: bool) -> Iterator[tuple]:
        count, ahead = batches_ahead() if self._started and placed else 0, None
        place = device_put.placer(self.model, count > 0) if placed else lambda batch: batch
        if count:
            self.close()
            ahead = self._ahead = Ahead(batches, count, place)
        self.taken = 0
        try:
            while True:
                busy = device_put.busy(self.clock.last_output())
                try:
                    batch, waited = _take(batches, busy) if ahead is None else ahead.take(busy)
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


def _take(batches: Iterator[Any], busy: Callable[[], bool] | None) -> tuple[Any, float]:
    begun = perf_counter()
    batch = next(batches)
    waited = perf_counter() - begun
    # If the device became idle meanwhile, it is not known when, so the whole time counts.
    return batch, 0.0 if busy is not None and busy() else waited


def batches_ahead() -> int:
    """Returns the number of batches to prefetch to the device in a thread; 0 for no thread."""
    text = os.environ.get(ENVIRONMENT)
    if text is None:
        return device_put.ahead()
    if not text.isdecimal():
        raise InputError(f"{ENVIRONMENT} is {text!r}; give a number of batches, 0 for none")
    return int(text)


def check_batch(model: keras.Model | None, batch: Any, is_raw: bool = False) -> None:
    """Raises `InputError` for inputs, labels and weights that the model cannot use.

    A model may have `check_data` and `check_labels`, the latter also by its loss. If they are raw,
    a preprocessor makes the inputs of these.
    """
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    parts = [keras.tree.map_structure(in_host_memory, part) for part in parts]
    if hasattr(model, "check_data") and not is_raw:
        _check_numbers("x", parts[0], ", or the model a preprocessor")
    for part, name in zip(parts, ("check_data", "check_labels"), strict=False):
        if (check := getattr(model, name, None)) is not None:
            check(part)
    loss: Any = getattr(model, "loss", None)
    if len(parts) > 1 and hasattr(model, "check_labels"):
        _check_numbers("y", parts[1])
    elif len(parts) > 1 and hasattr(loss, "check_labels"):
        loss.check_labels(parts[1], model)
    if len(parts) > 2:
        _check_weights(*parts[1:3])


def _check_weights(y: Any, weights: Any) -> None:
    _check_numbers("sample_weight", weights)
    for part in keras.tree.flatten(weights):
        if not isinstance(part, np.ndarray):
            continue
        if not (fits := np.isfinite(part)).all():
            raise InputError(f"sample_weight has {part[~fits].flat[0]}; give finite numbers")
    if isinstance(weights, np.ndarray) and isinstance(y, np.ndarray):
        padded = (*y.shape, *(1,) * (weights.ndim - y.ndim))[: weights.ndim]
        if any(own not in (1, size) for own, size in zip(weights.shape, padded, strict=True)):
            raise InputError(
                f"sample_weight has shape {weights.shape} beside labels of shape {y.shape}; give "
                "one for each sample, or for each label"
            )


def _check_numbers(name: str, tree: Any, instead: str = "") -> None:
    for part in keras.tree.flatten(tree):
        if isinstance(part, np.ndarray) and part.dtype.kind in "OSU":
            raise InputError(f"{name} has the dtype {part.dtype}; give numbers{instead}")


def in_host_memory(x: Any) -> Any:
    """Returns the numbers of a tensor on the CPU as an array; anything else as it is.

    Numbers on an accelerator stay there: to read them waits for the steps before.
    """
    if isinstance(x, np.ndarray) or (device := getattr(x, "__dlpack_device__", None)) is None:
        return x
    try:
        return np.asarray(x) if device()[0] == CPU else x
    except (BufferError, RuntimeError, TypeError, ValueError):
        return x  # a tensor over several devices, of a graph, or of a dtype that NumPy lacks


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


class DataWaitTimer:
    """Measures how long steps wait for data, in each epoch and over the run of `fit`.

    Only time in which a step has no batch and the device is idle counts: if the device computes
    while the next batch is made, no time is lost. The device is not synchronized for this.

    Args:
        workers: processes that make batches; 0 if the training process makes them.
        parameter: name of the argument for their number, such as "workers" or "--workers", or None.
        faster: other advice, for data that workers cannot make.

    Attributes:
        last_output: returns an output array of the last step of `fit`, or None.
        batches, waited, seconds: of the epoch: batches, seconds that steps waited, and all.
    """

    def __init__(self, workers: int = 0, parameter: str | None = None, faster: str | None = None):
        self.workers, self.parameter, self.faster = workers, parameter, faster
        self.last_output: Callable[[], Any] = lambda: None
        self._all_waited = self._all_seconds = 0.0
        self.begin_epoch()
        self._ended = True

    def begin_epoch(self) -> None:
        """Starts measuring, as the training of an epoch begins."""
        self.batches = self._made = 0
        self.waited = self.seconds = self._making = self._making_cpu = 0.0
        self._begun, self._begun_cpu = perf_counter(), time.process_time()
        self._later: tuple[float, float] | None = None
        self._ended = False

    def made(self, seconds: float, cpu: float) -> None:
        """Records the seconds in which a batch was made, here or by workers."""
        self._made += 1
        self._making += seconds
        self._making_cpu += cpu

    def waits(self, seconds: float) -> None:
        """Records the seconds that a step waited for its batch."""
        if self.batches == 1:
            # The first step compiles, and workers start, before this.
            self._later = (perf_counter() - seconds, self.waited)
        self.waited += seconds
        self.batches += 1

    def end_epoch(self) -> None:
        """Ends measuring, before the validation of an epoch."""
        if self._ended:
            return
        self._ended = True
        now = perf_counter()
        self._cpu = time.process_time() - self._begun_cpu
        self.seconds = now - self._begun
        self._all_seconds += self.seconds
        self._all_waited += self.waited

    @property
    def share(self) -> float:
        """Share of the training time of the run in which steps waited, from 0 to 1."""
        return min(self._all_waited / self._all_seconds, 1.0) if self._all_seconds else 0.0

    def line(self) -> str | None:
        """Returns the line to print after an epoch, or None if the wait was short."""
        self.end_epoch()
        if self.waited < max(SHOWN_SHARE * self.seconds, SHOWN_SECONDS):
            return None
        count = max(self.batches, 1)
        return (
            f"waited for data {self.waited / self.seconds:.0%} of the epoch "
            f"({1000 * self.waited / count:.1f} of {1000 * self.seconds / count:.1f} ms a batch): "
            f"{self._advice()}"
        )

    def _advice(self) -> str:
        if self.faster is not None:
            return self.faster
        since, first = self._later or (self._begun, 0.0)
        seconds, waited = self.seconds - (since - self._begun), self.waited - first
        count = self.batches - 1
        if count < 1 or waited < SHOWN_SHARE * seconds:
            return "nearly all of it before the first batch; keep workers between epochs"
        step = max((seconds - waited) / count, 1e-6)
        # Busy workers together make a batch in the time of a step and its wait.
        make = self.workers * seconds / count if self.workers else self._making / self._made
        # The share of computing in the time of workers, who may wait for a disk, is not known.
        make_cpu = 0.0 if self.workers else self._making_cpu / self._made
        # While the first step is compiled, about one core is busy.
        own = self._cpu - (since - self._begun - first)
        own -= 0.0 if self.workers else self._making_cpu
        cores = environment.cores()
        best = max(step, (make_cpu + max(own, 0.0) / count) / cores)
        left, share = 1 - step / best, waited / seconds
        need = max(math.ceil(make / best - SHOWN_SHARE), self.workers + 1)
        if left > 0.75 * share:
            return (
                f"no number of workers ends that, since {cores} cores have no room beside the "
                f"step for {1000 * make_cpu:.1f} ms a batch; make batches cheaper, or keep them"
            )
        named = f"a loader with {pluralize(need, 'worker')}"
        if self.parameter is not None:
            named = f"{self.parameter}{' ' if self.parameter.startswith('-') else '='}{need}"
        if self.workers and need > cores:
            return f"{named} would end that, unless they compute: there are {cores} cores"
        if left > SHOWN_SHARE:
            return f"{named} would leave {left:.0%}, and {cores} cores have no room for more"
        return f"{named} would end that"
