"""Batches of one shape, for data whose size is not a multiple of the batch."""

from time import perf_counter
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


class Timed(keras.utils.PyDataset):
    """A loader that counts the seconds its caller waits.

    On JAX and torch Keras asks for batches in the training thread. On TensorFlow tf.data asks ahead
    in another one, so there the count is an upper bound.
    """

    def __init__(self, loader: Any):
        super().__init__()
        self.loader = loader
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> Any:
        start = perf_counter()
        batch = self.loader[index]
        self.seconds += perf_counter() - start
        return batch
