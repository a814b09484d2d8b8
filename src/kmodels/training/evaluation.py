"""Batches of one shape, for data whose size is not a multiple of the batch."""

import threading
from time import perf_counter
from typing import Any

import keras
import numpy as np

from kmodels.errors import InputError


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
        self.error: InputError | None = None
        self.batch_size, self.samples = loader.maker.batch_size, len(loader.maker.source)
        self.weight = len(loader) * self.batch_size / self.samples

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        try:
            x, y = self.loader[index]
        except InputError as error:
            self.error = error
            raise
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

    Args:
        loader: batches by number.

    Attributes:
        seconds: waited so far.
        error: what the loader raised, if it did.
        seen: batches at the start of the epoch that are only gone through again; any batch stands
            for them, so that they need not be made.
    """

    def __init__(self, loader: Any):
        super().__init__()
        self.loader = loader
        self.seconds = 0.0
        self.error: InputError | None = None
        self.seen = 0
        self._stand_in: Any = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, index: int) -> Any:
        # tf.data may still ask for batches of the former epoch in another thread.
        with self._lock:
            start = perf_counter()
            try:
                if index < self.seen:
                    self._stand_in = self._stand_in or self.loader[self.seen % len(self)]
                    return self._stand_in
                return self.loader[index]
            except InputError as error:
                self.error = error
                raise
            finally:
                self.seconds += perf_counter() - start
