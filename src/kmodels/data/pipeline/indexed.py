"""Batches that have a number: of arrays, or of a PyDataset.

`IndexedBatches` cuts numbered samples into batches, `Mapped` applies a function to the batches of a
PyDataset, and `Numbered` iterates over either in a pipeline.
"""

import copy
import functools
import inspect
import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.arguments import Checked, Constructed
from kmodels.core.environment import SAFE_PATH, environ_with
from kmodels.core.errors import InputError
from kmodels.data.pipeline.arrays import Preprocess, as_tuple, in_parts, prepared, to_numpy
from kmodels.data.pipeline.position import Source
from kmodels.data.rng import order, philox
from kmodels.data.rows import rows_within


@functools.cache
def _arguments(cls: type) -> set[str]:
    """Returns the arguments of the constructors of kmodels that a loader inherits."""
    inits = (vars(x).get("__init__") for x in cls.__mro__ if x.__module__.startswith("kmodels."))
    return {name for init in inits if init for name in inspect.signature(init).parameters}


class ResumableBatches(Checked, keras.utils.PyDataset, metaclass=Constructed):
    """Numbered batches that can begin within an epoch; the base of the loaders of kmodels.

    Attributes:
        batches: number of batches in an epoch.
        epoch: number of the epoch, from 0.
        skip: batches that are skipped at its start.
        handed_out: batches of the epoch that were returned after those.
        derived: class attribute; further attributes that cannot be set later, as those of the
            constructor's arguments cannot.
        may_change: class attribute; arguments that can.
    """

    epoch = skip = handed_out = 0
    derived: ClassVar[tuple[str, ...]] = ()
    may_change: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses settings that workers and earlier batches may have."""
        if "_is_constructed" in vars(self) and name not in self.may_change:
            kind: type = type(self)
            if name in self.derived or name in _arguments(kind):
                raise InputError(f"{name} cannot be set later; make another {kind.__name__}")
        super().__setattr__(name, value)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        raise NotImplementedError

    @property
    def num_batches(self) -> int:
        """Number of batches left in this epoch."""
        return len(self)

    def __len__(self) -> int:
        return self.batches - self.skip

    def set_epoch(self, epoch: int, skip: int | None = None) -> None:
        """Sets the next epoch, from which the order and all random numbers follow.

        Args:
            epoch: number of the epoch, from 0.
            skip: batches to skip at its start, by which the loader is shorter until another epoch
                is set; by default 0, or unchanged for the same epoch.
        """
        if skip is None:
            skip = self.skip if epoch == self.epoch else 0
        if not 0 <= skip < self.batches:
            raise InputError(f"skip is {skip}; give 0 to {self.batches - 1} batches")
        self.epoch, self.skip, self.handed_out = epoch, skip, 0

    def on_epoch_end(self) -> None:
        """Sets the next epoch if all batches of this one were returned.

        Keras also calls this before training, when it has read one batch at most.
        """
        if self.handed_out >= len(self):
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Returns the position: the epoch, and the number of its batches that were returned."""
        return {"epoch": self.epoch, "batch": self.skip + self.handed_out}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the batch of a state; see `kmodels.data.StatefulLoader`."""
        epoch, batch = state_dict["epoch"], state_dict["batch"]
        over = batch >= self.batches
        self.set_epoch(epoch + over, 0 if over else batch)

    def number_of(self, index: int) -> int:
        """Returns the number of a batch in its epoch, given its index among the remaining batches.

        Raises:
            IndexError: after the last batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        return index + self.skip


class IndexedBatches(ResumableBatches):
    """Batches of numbered samples; seed and epoch determine the order on every backend.

    Args:
        take: returns the batch (x,), (x, y) or (x, y, sample_weight) of sample numbers, a slice or
            int (B,).
        count: number of samples, which is the attribute `samples`.
        batch_size: samples per batch.
        shuffle: a new order in each epoch; "batch" shuffles within each batch.
        seed: seed of the order.
        preprocess: applied to each batch.

    Attributes:
        whole: the arrays that the batches are rows of; None if they are in a file, or unknown.
    """

    whole: tuple | None = None
    may_change = ("preprocess", "seed")

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

    def part(self, start: int, stop: int) -> "IndexedBatches":
        """Returns a dataset of rows start to stop of the same batches, see `rows_within`."""
        part = copy.copy(self)
        part._rows = start, stop
        return part

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.samples // self.batch_size)

    def __getitem__(self, index: int) -> tuple:
        number = self.number_of(index)
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.samples)
        within = rows_within(*(self._rows or (0, self.batch_size)), stop - start)
        self.handed_out = max(self.handed_out, index + 1)
        return prepared(self.take(self._samples(number, start, stop, within)), self.preprocess)

    def _samples(self, number: int, start: int, stop: int, within: slice) -> np.ndarray | slice:
        if not self.shuffle:
            return slice(start + within.start, start + within.stop)
        if self.shuffle == "batch":
            bits = philox(self.seed, "order", self.epoch, number).random_raw(stop - start)
            return start + np.argsort(bits, kind="stable")[within]
        if self._orders is None or self._orders[0] != self.epoch:
            self._orders = self.epoch, order(self.samples, self.seed, self.epoch)
        return self._orders[1][start:stop][within]


class Mapped(keras.utils.PyDataset):
    """The batches of a PyDataset, preprocessed; its methods for epochs are called too."""

    def __init__(self, dataset: keras.utils.PyDataset, preprocess: Preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._preprocess = preprocess
        if hasattr(dataset, "set_epoch"):  # as of an `ImageLoader`
            self.set_epoch = dataset.set_epoch

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch."""
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple:
        return prepared(as_tuple(self._dataset[index]), self._preprocess)

    def on_epoch_begin(self) -> None:
        """Calls the method of the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Calls the method of the dataset."""
        self._dataset.on_epoch_end()


class Numbered(Source):
    """Source of the batches of a PyDataset, which can begin at any batch.

    With a seed, each epoch has a new order of the batches, as with Keras' `shuffle`, except for
    data with `set_epoch`, which has its own. If the data has `handed_out`, `on_epoch_end` sets it.

    Attributes:
        last: number of the first batch that is not shuffled; None to shuffle all.
    """

    seekable = True
    last: int | None = None

    def __init__(self, data: keras.utils.PyDataset, seed: int | None = None):
        self.data: Any = data
        self._seed = None if hasattr(data, "set_epoch") else seed
        self._epoch = 0
        self._by_workers = data.workers > 1 or (data.workers > 0 and data.use_multiprocessing)
        # Workers request batches long before they are used, so a state would be a later one; the
        # order of arrays follows from seed and epoch, so a checkpoint needs no state of them.
        no_state = self._by_workers or isinstance(data, IndexedBatches)
        self.stateful = None if no_state else data

    @property
    def num_batches(self) -> int | None:
        """Number of batches left in an epoch; None if it has no end."""
        return self.data.num_batches

    @property
    def draws(self) -> bool:
        """True if making a batch may use the random generators of the process."""
        return not isinstance(self.data, IndexedBatches) or self.data.preprocess is not None

    def begin(self, first: int = 0) -> Iterator[Any]:
        """Begins a pass at a batch of this number."""
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
        if isinstance(self.data, IndexedBatches | Mapped):  # `prepared` has made it
            return batch
        return keras.tree.map_structure(
            lambda leaf: leaf if leaf is None or keras.ops.is_tensor(leaf) else to_numpy(leaf),
            in_parts(batch),
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch of the data."""
        self._epoch = epoch
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def on_epoch_begin(self) -> None:
        """Calls the method of the data, as Keras does."""
        self.data.on_epoch_begin()

    def on_epoch_end(self, taken: int, wanted: int | None) -> None:
        """Sets the number of batches that were used, and calls the method of the data.

        The data has counted the batches that it made: more, or one less over a mesh.
        """
        whole = wanted is not None and taken >= wanted
        self._epoch += whole
        if hasattr(self.data, "handed_out"):
            self.data.handed_out = self.data.num_batches if whole else taken
        self.data.on_epoch_end()


def _of_workers(data: Any, numbers: Iterable[int]) -> Iterator[Any]:
    """Yields the batches of these numbers in order, prefetched by the workers of a PyDataset."""
    if data.use_multiprocessing:
        # By the default start method: forked processes need no copy of the data.
        context = multiprocessing.get_context()
        executor: Executor = ProcessPoolExecutor(data.workers, context, _give, (data,))
        ask = _batch_of_worker
    else:
        executor, ask = ThreadPoolExecutor(data.workers), data.__getitem__
    asked: deque[Any] = deque()
    try:
        for number in numbers:
            with environ_with(SAFE_PATH):  # the first ones start processes
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
