"""Batches that can be asked for by their number: those of samples side by side, or of a PyDataset.

`IndexedBatches` cuts numbered samples into batches, and `Mapped` passes those of any PyDataset
through a function. `Numbered` goes through either in a pipeline.
"""

import copy
import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from kmodels.core.environment import SAFE_PATH, environ_with
from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import Preprocess, as_tuple, in_parts, prepared, to_numpy
from kmodels.data.rng import order, philox
from kmodels.data.rows import rows_within


class IndexedBatches(keras.utils.PyDataset):
    """Gives batches of numbered samples in the order of (seed, epoch), alike on every backend.

    Args:
        take: from a slice of sample numbers, or an array of them, int (B,), to a batch (x,),
            (x, y) or (x, y, sample_weight).
        count: number of samples.
        batch_size: samples per batch.
        shuffle: a new order in each epoch; "batch" shuffles within each batch.
        seed: seed of the order.
        preprocess: applied to each batch.

    Attributes:
        samples: in an epoch.
        whole: the arrays that the batches are rows of, or None.
    """

    whole: tuple | None = None

    def __init__(
        self,
        take: Callable[[np.ndarray | slice], tuple],
        count: int,
        batch_size: int,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        preprocess: Preprocess | None = None,
    ):
        super().__init__()
        if count < 1:
            raise InputError("the data is empty; give at least one sample")
        self.take = take
        self.samples = count
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.preprocess = preprocess
        self._rows: tuple[int, int] | None = None
        self._orders: tuple[int, np.ndarray] | None = None
        self.handed_out = 0
        self.epoch = 0

    def part(self, start: int, stop: int) -> "IndexedBatches":
        """Returns the same batches with these rows alone, see `rows_within`."""
        part = copy.copy(self)
        part._rows = start, stop
        return part

    @property
    def num_batches(self) -> int:
        """Returns how many batches an epoch has."""
        return -(-self.samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tells which epoch comes next."""
        self.epoch, self.handed_out = epoch, 0

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch where this one was handed out in full."""
        if self.handed_out >= self.num_batches:
            self.set_epoch(self.epoch + 1)

    def __getitem__(self, index: int) -> tuple:
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.samples)
        within = rows_within(*(self._rows or (0, self.batch_size)), stop - start)
        self.handed_out = max(self.handed_out, index + 1)
        return prepared(self.take(self._samples(index, start, stop, within)), self.preprocess)

    def _samples(self, index: int, start: int, stop: int, within: slice) -> np.ndarray | slice:
        if not self.shuffle:
            return slice(start + within.start, start + within.stop)
        if self.shuffle == "batch":
            bits = philox(self.seed, "order", self.epoch, index).random_raw(stop - start)
            return start + np.argsort(bits, kind="stable")[within]
        if self._orders is None or self._orders[0] != self.epoch:
            self._orders = self.epoch, order(self.samples, self.seed, self.epoch)
        return self._orders[1][start:stop][within]


class Mapped(keras.utils.PyDataset):
    """Passes the batches of a PyDataset through a function.

    Args:
        dataset: any; what Keras and `fit` tell about epochs is passed on to it.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy.
    """

    def __init__(self, dataset: keras.utils.PyDataset, preprocess: Preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._preprocess = preprocess
        if hasattr(dataset, "set_epoch"):  # as of an `ImageLoader`
            self.set_epoch = dataset.set_epoch

    @property
    def num_batches(self) -> int | None:
        """Returns how many batches an epoch has."""
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple:
        return prepared(as_tuple(self._dataset[index]), self._preprocess)

    def on_epoch_begin(self) -> None:
        """Passes on that an epoch begins."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes on that an epoch has ended."""
        self._dataset.on_epoch_end()


class Numbered:
    """Source of the batches of a PyDataset; a pass may begin at any of them.

    Args:
        data: ours or a user's. Where it has `handed_out`, it is told how many batches were.
        seed: of a new order of its batches in each epoch, as Keras has them with `shuffle`; None
            for their own. A loader that is told its epoch has an order of its own.

    Attributes:
        last: number of the first batch that keeps its place; None for no such batch.
    """

    seekable = True
    faster: str | None = None

    last: int | None = None

    def __init__(self, data: keras.utils.PyDataset, seed: int | None = None):
        self.data: Any = data
        self._seed = None if hasattr(data, "set_epoch") else seed
        self._epoch = 0
        self._by_workers = data.workers > 1 or (data.workers > 0 and data.use_multiprocessing)
        # Workers ask for batches long before they are taken, so a state would be of a later one.
        self.stateful = None if self._by_workers else data

    @property
    def num_batches(self) -> int | None:
        """The number of batches that an epoch has, or has left; None for no end."""
        return self.data.num_batches

    @property
    def draws(self) -> bool:
        """Whether making a batch may draw from the random generators of the process."""
        return not isinstance(self.data, IndexedBatches) or self.data.preprocess is not None

    def begin(self, first: int = 0) -> Iterator[Any]:
        """Begins a pass at a batch."""
        count, data = self.data.num_batches, self.data
        numbers: Iterable[int] = itertools.count(first)
        if count is not None:
            numbers = range(count)[first:]
            if self._seed is not None:
                shuffled = order(count if self.last is None else self.last, self._seed, self._epoch)
                numbers = [*shuffled.tolist(), *range(len(shuffled), count)][first:]
        if self._by_workers:
            return _of_workers(data, numbers)
        return map(data.__getitem__, numbers)

    def as_batch(self, batch: Any) -> tuple:
        """Returns (x,), (x, y) or (x, y, sample_weight), in NumPy or tensors of the backend."""
        if isinstance(self.data, IndexedBatches | Mapped):  # `prepared` made it
            return batch
        return tuple(map(_on_host, in_parts(batch)))

    def start(self) -> None:
        """Is told that training starts, which changes nothing."""

    def set_epoch(self, epoch: int) -> None:
        """Tells the data which epoch comes next."""
        self._epoch = epoch
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def on_epoch_begin(self) -> None:
        """Tells the data, as Keras does."""
        self.data.on_epoch_begin()

    def on_epoch_end(self, taken: int, wanted: int | None) -> None:
        """Tells the data that an epoch has ended, and how many batches of it were taken.

        It has counted the batches that were made, which may be more, or of which an epoch over a
        mesh leaves the last one out.
        """
        whole = wanted is not None and taken >= wanted
        self._epoch += whole
        if hasattr(self.data, "handed_out"):
            self.data.handed_out = self.data.num_batches if whole else taken
        self.data.on_epoch_end()


def _on_host(part: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: leaf if leaf is None or keras.ops.is_tensor(leaf) else to_numpy(leaf), part
    )


def _of_workers(data: Any, numbers: Iterable[int]) -> Iterator[Any]:
    """Yields the batches of these numbers in order, made ahead by the workers of a PyDataset."""
    if data.use_multiprocessing:
        # Begun as `multiprocessing` begins processes: a forked one need not be sent the data.
        context = multiprocessing.get_context()
        executor: Executor = ProcessPoolExecutor(data.workers, context, _give, (data,))
        ask = _batch_of_worker
    else:
        executor, ask = ThreadPoolExecutor(data.workers), data.__getitem__
    asked: deque[Any] = deque()
    try:
        for number in numbers:
            with environ_with(SAFE_PATH):  # in which the first ones start processes
                asked.append(executor.submit(ask, number))
            if len(asked) > max(data.max_queue_size, data.workers):
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_data_of_worker: Any = None


def _give(data: Any) -> None:
    global _data_of_worker
    _data_of_worker = data


def _batch_of_worker(number: int) -> Any:
    return _data_of_worker[number]
