"""Rows of token ids in batches of one size, for `fit` and `evaluate`."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.rng import order
from kmodels.text.packing import Batch


class _Loader(keras.utils.PyDataset):
    """Full batches of numbered rows, resumable within an epoch.

    Args:
        count: rows of an epoch.
        batch_size: rows per batch; first rows of the last batch are repeated to fill it.
        shuffle: a new order in each epoch, a function of seed and epoch.
        seed: seed of the order.
    """

    def __init__(self, count: int, batch_size: int, *, shuffle: bool, seed: int):
        super().__init__()
        check_whole("batch_size", batch_size)
        self.count, self.batch_size, self.shuffle, self.seed = count, batch_size, shuffle, seed
        self._batches = -(-count // batch_size)
        self._rows = slice(0, batch_size)
        self.epoch = self.skip = self.handed_out = 0

    @property
    def samples(self) -> int:
        """Number of rows in an epoch, including those that fill the last batch."""
        return self._batches * self.batch_size

    def part(self, start: int, stop: int) -> Self:
        """Returns a loader of the same batches, each cut to the rows from start to stop."""
        part = copy.copy(self)
        part._rows = slice(start, stop)
        return part

    @property
    def num_batches(self) -> int:
        """Number of batches left in this epoch."""
        return len(self)

    def __len__(self) -> int:
        return self._batches - self.skip

    def set_epoch(self, epoch: int, skip: int | None = None) -> None:
        """Sets the next epoch.

        Args:
            epoch: number of the epoch, from 0.
            skip: batches to skip at its start; by default 0, or unchanged for the same epoch.
        """
        if skip is None:
            skip = self.skip if epoch == self.epoch else 0
        if not 0 <= skip < self._batches:
            raise InputError(f"skip is {skip}; give 0 to {self._batches - 1} batches")
        self.epoch, self.skip, self.handed_out = epoch, skip, 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position: the epoch, and the number of its batches that were returned."""
        return {"epoch": self.epoch, "batch": self.skip + self.handed_out}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the batch of a state; see `kmodels.data.StatefulLoader`."""
        epoch, batch = state_dict["epoch"], state_dict["batch"]
        over = batch >= self._batches
        self.set_epoch(epoch + over, 0 if over else batch)

    def _numbers(self, index: int) -> tuple[np.ndarray, int]:
        """Returns the row numbers of a batch, and how many of them do not only fill it."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        rows = order(self.count, self.seed, self.epoch) if self.shuffle else np.arange(self.count)
        start = (index + self.skip) * self.batch_size
        rows = rows[start : start + self.batch_size]
        self.handed_out = max(self.handed_out, index + 1)
        return np.resize(rows, self.batch_size), len(rows)


class TextLoader(_Loader):
    """Batches of rows, equal on every backend, resumable within an epoch.

    All batches are full: rows with weight 0 fill the last one. Weights are scaled so that Keras'
    loss of an epoch, a mean over all positions of all rows, is the mean over the tokens to learn.
    So losses are comparable across padding, batch sizes and packing.

    Args:
        rows: (dictionary of inputs, labels, weights), as a preprocessor returns them.
        batch_size: rows per batch.
        shuffle: a new order in each epoch, a function of seed and epoch.
        seed: seed of the order.

    Raises:
        InputError: if there is no row, or no token to learn in them.
    """

    def __init__(self, rows: Batch, batch_size: int, *, shuffle: bool = False, seed: int = 0):
        self.inputs, self.labels, self.weights = rows
        super().__init__(len(self.labels), batch_size, shuffle=shuffle, seed=seed)
        self.tokens = int(np.count_nonzero(self.weights))
        if not self.tokens:
            raise InputError("the data is empty; give at least one record with a response")
        positions = self.samples * self.labels.shape[1]
        self._scale = np.float32(positions / self.weights.sum(dtype="float64"))

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray, np.ndarray]:
        filled, count = self._numbers(index)
        weights = self.weights[filled] * self._scale
        weights[count:] = 0.0
        filled, weights = filled[self._rows], weights[self._rows]
        inputs = {name: value[filled] for name, value in self.inputs.items()}
        return inputs, self.labels[filled], weights


class RecordLoader(_Loader):
    """Batches of records that are preprocessed batch by batch, for data that memory cannot hold.

    All batches are full: rows with weight 0 fill the last one. The weights of a batch have the mean
    1, so its loss is the mean over its tokens to learn, as in transformers.

    Args:
        records: records that the preprocessor takes; images may be paths.
        preprocessor: (list of records) to (dictionary of inputs, labels, weights).
        batch_size: rows per batch.
        shuffle: a new order in each epoch, a function of seed and epoch.
        seed: seed of the order.

    Raises:
        InputError: if there is no record.

    Example:
        records = kmodels.text.read_records("captions.jsonl").rows
        model.fit(kmodels.text.RecordLoader(records, model.preprocessor, 8, shuffle=True))
    """

    def __init__(
        self,
        records: Sequence[Any],
        preprocessor: Callable[[list[Any]], Batch],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ):
        super().__init__(len(records), batch_size, shuffle=shuffle, seed=seed)
        if not self.count:
            raise InputError("the data is empty; give at least one record with a response")
        self.records, self.preprocessor = records, preprocessor

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray, np.ndarray]:
        filled, count = self._numbers(index)
        inputs, labels, weights = self.preprocessor([self.records[i] for i in filled])
        weights[count:] = 0.0
        weights = weights * np.float32(weights.size / max(float(weights.sum()), 1e-9))
        rows = self._rows
        return {name: x[rows] for name, x in inputs.items()}, labels[rows], weights[rows]
