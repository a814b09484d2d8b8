"""Batches of one shape, for data whose size is not a multiple of the batch."""

import threading
from typing import Any

import keras

from kmodels.data.fit.request import Method
from kmodels.distribution import current
from kmodels.distribution.input import fit
from kmodels.distribution.input.indexed import ShardedDataset
from kmodels.distribution.input.sharding_rule import BatchSharding


class WholeBatches(ShardedDataset):
    """Fills the last batch up with rows of no weight.

    A shorter last batch would be compiled anew on JAX, and does not divide over a mesh. The other
    rows weigh a little more than 1, so that averages over the padded number of rows, which is how
    Keras averages losses, are averages over the real ones. Metrics must be `weighted_metrics`.
    Over a mesh each process has its rows of every batch.

    Args:
        loader: a `kmodels.data.ImageLoader` that does not shuffle.
    """

    def __init__(self, loader: Any):
        plan = current()
        super().__init__(
            loader, BatchSharding() if plan is None else fit.rule(plan), Method.EVALUATE
        )
        self.loader = loader


class Resumed(keras.utils.PyDataset):
    """Begins the epoch of a loader with batches that are only gone through again.

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
