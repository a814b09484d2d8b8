"""Batches of one shape, for data whose size is not a multiple of the batch."""

import threading
from typing import Any

import keras
import numpy as np


class WholeBatches(keras.utils.PyDataset):
    """Fills the last batch up with rows of no weight.

    A shorter last batch would be compiled anew on JAX, and does not divide over a mesh. The other
    rows weigh a little more than 1, so that averages over the padded number of rows, which is how
    Keras averages losses, are averages over the real ones. Metrics must be `weighted_metrics`.

    Args:
        loader: a `kmodels.data.ImageLoader` that does not shuffle.
    """

    def __init__(self, loader: Any):
        super().__init__()
        self.loader = loader
        self.batch_size, self.samples = loader.maker.batch_size, len(loader.maker.source)
        self.weight = len(loader) * self.batch_size / self.samples

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y = self.loader[index]
        weights = np.full(len(y), self.weight, "float32")
        if missing := self.batch_size - len(y):
            rows = np.arange(missing) % len(y)
            x, y = np.concatenate([x, x[rows]]), np.concatenate([y, y[rows]])
            weights = np.concatenate([weights, np.zeros(missing, "float32")])
        return x, y, weights


class Resumed(keras.utils.PyDataset):
    """A loader whose epoch begins with batches that are only gone through again.

    Args:
        loader: batches by number.

    Attributes:
        seen: how many; any batch stands for them, so that they need not be made.
    """

    def __init__(self, loader: Any):
        super().__init__()
        self.loader = loader
        self.seen = 0
        self._stand_in: Any = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> Any:
        # tf.data may still ask for batches of the former epoch in another thread.
        with self._lock:
            if index < self.seen:
                self._stand_in = self._stand_in or self.loader[self.seen % len(self)]
                return self._stand_in
            return self.loader[index]
