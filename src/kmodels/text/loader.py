"""Rows of token ids in batches of one size, for `fit` and `evaluate`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.pipeline.indexed import ResumableBatches
from kmodels.data.rng import order
from kmodels.text.packing import Batch


class _Loader(ResumableBatches):
    """Full batches of rows by number; first rows of the last batch are repeated to fill it."""

    def __init__(self, count: int, batch_size: int, *, shuffle: bool, seed: int):
        super().__init__()
        check_whole("batch_size", batch_size)
        self.count, self.batch_size, self.shuffle, self.seed = count, batch_size, shuffle, seed
        self._rows = slice(0, batch_size)
        # Epoch and order of the last batch: an order of a million rows takes 0.2 s.
        self._order = -1, np.arange(count)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.count // self.batch_size)

    @property
    def samples(self) -> int:
        """Number of rows in an epoch, including those that fill the last batch."""
        return self.batches * self.batch_size

    def part(self, start: int, stop: int) -> Self:
        """Returns a loader of the same batches, each cut to the rows from start to stop."""
        part = copy.copy(self)
        part._rows = slice(start, stop)
        return part

    def _numbers(self, index: int) -> tuple[np.ndarray, int]:
        """Returns the row numbers of a batch, and how many of them do not only fill it."""
        start = self.number_of(index) * self.batch_size
        if self.shuffle and self._order[0] != self.epoch:
            self._order = self.epoch, order(self.count, self.seed, self.epoch)
        rows = self._order[1][start : start + self.batch_size]
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
        InputError: if there is no row or no token to learn in them, or for rows in another form.
    """

    derived = ("count", "weights", "tokens")

    def __init__(self, rows: Batch, batch_size: int, *, shuffle: bool = False, seed: int = 0):
        if not isinstance(rows, tuple | list) or len(rows) != 3 or not isinstance(rows[0], Mapping):
            raise InputError(
                f"rows are a {type(rows).__name__}; give (inputs by name, labels, weights), as a "
                "preprocessor returns them"
            )
        self.inputs, self.labels, self.weights = rows
        shapes = {**self.inputs, "labels": self.labels, "weights": self.weights}
        shapes = {name: np.shape(part) for name, part in shapes.items()}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) > 1 or shapes["labels"] != shapes["weights"]:
            sizes = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise InputError(f"rows have the shapes {sizes}; give as many, and a weight per label")
        if not (np.isfinite(self.weights) & (self.weights >= 0)).all():
            raise InputError("rows have weights that are negative or not finite; give 0 or more")
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

    All batches are full: rows with weight 0 fill the last one. In `fit` and `evaluate` of a model
    that divides its loss by learnt tokens or examples, see `CausalLM.compile`, the weights are
    those of the preprocessor. Otherwise those of a batch are scaled to the mean 1, so that a mean
    over its positions is the mean over its tokens to learn.

    Args:
        records: records that the preprocessor takes; images may be paths.
        preprocessor: (list of records) to (dictionary of inputs, labels, weights).
        batch_size: rows per batch.
        shuffle: a new order in each epoch, a function of seed and epoch.
        seed: seed of the order.

    Attributes:
        scales_weights: False to leave the weights as they are.

    Raises:
        InputError: if there is no record, or for columns.

    Example:
        records = kmodels.text.read_records("captions.jsonl").rows
        model.fit(kmodels.text.RecordLoader(records, model.preprocessor, 8, shuffle=True))
    """

    scales_weights = True

    def __init__(
        self,
        records: Sequence[Any],
        preprocessor: Callable[[list[Any]], Batch],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ):
        if isinstance(records, Mapping):
            raise InputError(f"records are columns ({', '.join(records)}); give a list of records")
        super().__init__(len(records), batch_size, shuffle=shuffle, seed=seed)
        if not self.count:
            raise InputError("the data is empty; give at least one record with a response")
        self.records, self.preprocessor = records, preprocessor

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray, np.ndarray]:
        filled, count = self._numbers(index)
        inputs, labels, weights = self.preprocessor([self.records[i] for i in filled])
        weights[count:] = 0.0
        if self.scales_weights:
            weights = weights * np.float32(weights.size / max(float(weights.sum()), 1e-9))
        rows = self._rows
        return {name: x[rows] for name, x in inputs.items()}, labels[rows], weights[rows]
