"""Rows of token ids in batches of one size, for `fit` and `evaluate`."""

import copy
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.rng import order
from kmodels.text.packing import Batch


class TextLoader(keras.utils.PyDataset):
    """Batches of rows, equal on every backend, resumable within an epoch.

    All batches are full: rows of no weight fill the last one. Weights are multiplied by one number,
    such that Keras' loss of an epoch, a mean over all positions of all rows, is the mean over the
    tokens to learn. Losses therefore compare whatever the padding, the batch size and the packing
    are.

    Args:
        rows: (dictionary of inputs, labels, weights), as a preprocessor gives them.
        batch_size: rows per batch.
        shuffle: a new order in each epoch, a function of seed and epoch.
        seed: seed of the order.

    Raises:
        InputError: if there is no row, or nothing to learn in them.
    """

    def __init__(self, rows: Batch, batch_size: int, *, shuffle: bool = False, seed: int = 0):
        super().__init__()
        check_whole("batch_size", batch_size)
        self.inputs, self.labels, self.weights = rows
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.count = len(self.labels)
        self.tokens = int(np.count_nonzero(self.weights))
        if not self.tokens:
            raise InputError("the data is empty; give at least one record with a response")
        self._batches = -(-self.count // batch_size)
        positions = self._batches * batch_size * self.labels.shape[1]
        self._scale = np.float32(positions / self.weights.sum(dtype="float64"))
        self._rows = slice(0, batch_size)
        self.epoch = self.skip = self.handed_out = 0

    @property
    def samples(self) -> int:
        """Rows in an epoch, those that fill the last batch included."""
        return self._batches * self.batch_size

    def part(self, start: int, stop: int) -> "TextLoader":
        """Returns the same batches, less all rows but these."""
        part = copy.copy(self)
        part._rows = slice(start, stop)
        return part

    @property
    def num_batches(self) -> int:
        """Batches left in this epoch."""
        return len(self)

    def __len__(self) -> int:
        return self._batches - self.skip

    def set_epoch(self, epoch: int, skip: int | None = None) -> None:
        """Tells which epoch comes next.

        Args:
            epoch: from 0.
            skip: batches to leave out at its start; by default 0, or as before where the epoch
                stays the same.
        """
        if skip is None:
            skip = self.skip if epoch == self.epoch else 0
        if not 0 <= skip < self._batches:
            raise InputError(f"skip is {skip}; give 0 to {self._batches - 1} batches")
        self.epoch, self.skip, self.handed_out = epoch, skip, 0

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches of which epoch were handed out."""
        return {"epoch": self.epoch, "batch": self.skip + self.handed_out}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on after the batch of a state; see `kmodels.data.StatefulLoader`."""
        epoch, batch = state_dict["epoch"], state_dict["batch"]
        over = batch >= self._batches
        self.set_epoch(epoch + over, 0 if over else batch)

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        rows = order(self.count, self.seed, self.epoch) if self.shuffle else np.arange(self.count)
        start = (index + self.skip) * self.batch_size
        rows = rows[start : start + self.batch_size]
        filled = np.resize(rows, self.batch_size)
        weights = self.weights[filled] * self._scale
        weights[len(rows) :] = 0.0
        filled, weights = filled[self._rows], weights[self._rows]
        self.handed_out = max(self.handed_out, index + 1)
        inputs = {name: value[filled] for name, value in self.inputs.items()}
        return inputs, self.labels[filled], weights
