"""One process's rows of batches that can be asked for by their number."""

import copy

import keras

from kmodels.core.errors import InputError
from kmodels.data.fit.batches import IndexedBatches, Preprocess, as_tuple, prepared
from kmodels.data.fit.request import Method
from kmodels.data.fit.rows import rows_within
from kmodels.distribution.input.sharding_rule import (
    BatchSharding,
    filled,
    length,
    uneven,
)


class ShardedDataset(keras.utils.PyDataset):
    """Gives the rows of one process of batches that have numbers.

    Args:
        source: has `batch_size`, `samples`, `num_batches` and `part(start, stop)`.
        rule: what to take.
        use: what it is for.
        steps: batches to end after, in evaluate and predict.

    Attributes:
        samples: number of samples of all processes in an epoch, without those that are left out.
        rows: rows of a batch that this process takes.
        fills: whether there are rows that stand for none.

    Raises:
        InputError: where the mesh does not divide a batch, or there is no full one to train on.
    """

    def __init__(
        self, source: IndexedBatches, rule: BatchSharding, use: Method, steps: int | None = None
    ):
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self._size, self._there = source.batch_size, source.samples
        self._start, stop = rule.rows(self._size)
        self.rows = stop - self._start
        self.source, self.use = source.part(self._start, stop), use
        self._weight: float | None = None
        self._left_out = self.handed_out = 0
        if use is Method.FIT:
            self._left_out = int(self._there % self._size > 0)
            self.samples = self._there - self._there % self._size
            if not self.samples:
                raise InputError(
                    f"the data has {self._there} samples and a batch {self._size}; give a smaller "
                    "batch_size: over a mesh only full batches are trained on"
                )
        else:
            batches = min(source.num_batches, steps or source.num_batches)
            self._there = min(self._there, batches * self._size)
            self._batches, self.samples, weight = rule.extent(batches, self._there, self._size)
            self._weight = weight if use is Method.EVALUATE else None
        self.fills = self._weight not in (None, 1.0)

    def prepared_by(self, preprocess: Preprocess | None) -> "ShardedDataset":
        """Takes a model's preprocessor, where the data is of a kind that it is applied to."""
        if getattr(self.source, "preprocess", preprocess) is None:
            self.source.preprocess = preprocess
        return self

    @property
    def num_batches(self) -> int:
        """Returns how many batches this epoch has left, as many in each process."""
        return len(self)

    def __len__(self) -> int:
        return self.source.num_batches - self._left_out if self.use is Method.FIT else self._batches

    def __getitem__(self, index: int) -> tuple:
        if self.use is Method.FIT:
            self.handed_out = max(self.handed_out, index + 1)
            return self.source[index]
        # A process may have fewer batches of data of its own than others.
        batch = as_tuple(self.source[min(index, self.source.num_batches - 1)])
        real = min(self._there - index * self._size, self._size) - self._start
        return filled(batch, self.rows, real, self._weight)

    @property
    def epoch(self) -> int:
        """Returns the epoch that comes, or is continuing."""
        return getattr(self.source, "epoch", 0)

    def set_epoch(self, epoch: int, skip: int | None = None) -> None:
        """Tells which epoch comes next; see `kmodels.data.ImageLoader.set_epoch`."""
        self.handed_out = 0
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch, *(() if skip is None else (skip,)))

    def on_epoch_begin(self) -> None:
        """Tells the data, as Keras does."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch where this one was handed out in full."""
        if not hasattr(self.source, "set_epoch"):
            self.source.on_epoch_end()
        elif self.handed_out >= len(self):
            self.set_epoch(self.epoch + 1)

    def close(self) -> None:
        """Ends the workers, if there are any."""
        if hasattr(self.source, "close"):
            self.source.close()


class Given(keras.utils.PyDataset):
    """Gives some rows of the batches of a user's PyDataset, which have one size.

    Args:
        dataset: its first and its last batch, which may be shorter, are read here.

    Raises:
        InputError: for a batch of another size, here or later, or data without an end.
    """

    def __init__(self, dataset: keras.utils.PyDataset):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        if (count := dataset.num_batches) is None:
            raise InputError(
                f"{type(dataset).__name__} has no end; over a mesh give it num_batches, or give a "
                "function that gives its batches"
            )
        self.dataset, self.preprocess, self._count = dataset, None, count
        self.batch_size = length(as_tuple(dataset[0]))
        self._rows = 0, self.batch_size
        last = self._checked(count - 1, as_tuple(dataset[count - 1]))
        self.samples = (count - 1) * self.batch_size + last

    def part(self, start: int, stop: int) -> "Given":
        """Returns the same batches with these rows alone."""
        part = copy.copy(self)
        part._rows = start, stop
        return part

    @property
    def num_batches(self) -> int:
        """Returns how many batches an epoch has."""
        return self._count

    def __getitem__(self, index: int) -> tuple:
        batch = as_tuple(self.dataset[index])
        rows = rows_within(*self._rows, self._checked(index, batch))
        batch = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], batch)
        return batch if self.preprocess is None else prepared(batch, self.preprocess)

    def on_epoch_begin(self) -> None:
        """Tells the data, as Keras does."""
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the data, as Keras does."""
        self.dataset.on_epoch_end()

    def _checked(self, index: int, batch: tuple) -> int:
        size = length(batch)
        if size > self.batch_size or (size < self.batch_size and index < self._count - 1):
            raise uneven(size, self.batch_size)
        return size
