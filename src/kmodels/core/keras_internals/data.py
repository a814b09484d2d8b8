"""Keras' adapters of data."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter as data_adapter_base
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

# Base of what Keras' trainers take as it is, with the methods that they call on data.
DataAdapter: Any = data_adapter_base.DataAdapter


def data_adapter(x: Any, **settings: Any) -> Any:
    """Returns what Keras makes of data that it knows; the settings are those of `fit`."""
    return data_adapters.get_data_adapter(x, **settings)


def set_epoch(adapter: Any, epoch: int) -> None:
    """Tells what `data_adapter` gave which epoch comes next.

    Since 3.16 Keras shuffles arrays and the batches of a PyDataset by a count of its own, which
    would begin anew where a run is resumed. Before, it took random generators, and no count.
    """
    if hasattr(adapter, "_epoch"):
        adapter._epoch = epoch + 1  # Keras has counted one when the first begins.


def side_by_side(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """So many batches stacked, for Keras' steps of several batches on JAX since 3.16."""
    return data_adapter_utils.super_batch_iterator(batches, count, stack_fn=keras.ops.stack)


class PyDatasetBatches(PyDatasetAdapter):
    """Keras' adapter of a `keras.utils.PyDataset`, whose batches a subclass may hand on its way."""

    def __init__(self, dataset: Any, class_weight: dict[int, float] | None = None):
        super().__init__(dataset, class_weight=class_weight)

    def raw(self) -> Iterable[Any]:
        """Returns one pass over the batches as Keras makes them of the dataset."""
        return super()._get_iterator()

    def handed(self) -> Iterator[Any]:
        """Returns one pass over the batches as the steps of every backend take them."""
        return iter(self.raw())

    def as_batch(self, batch: Any) -> Any:
        """Returns the tuple (x, y, sample_weight) that Keras makes of what a dataset gives."""
        return self._standardize_batch(batch)

    def _get_iterator(self) -> Iterator[Any]:
        return self.handed()
