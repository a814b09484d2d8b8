"""Keras' adapters of data: what they hold, and a pass that others give the batches of."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter as data_adapter_base
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from kmodels.core.types import Data, Tree

# Base of what Keras' trainers take as it is, with the methods that they call on data.
DataAdapter: Any = data_adapter_base.DataAdapter
# The attributes in which Keras' adapters of loaders hold what they were given; an adapter of arrays
# has none of them.
_HELD = ("py_dataset", "_dataloader", "_dataset", "generator")


def data_adapter(x: Data, **settings: Any) -> Any:
    """Returns what Keras makes of data that it knows; the settings are those of `fit`."""
    return data_adapters.get_data_adapter(x, **settings)


def set_epoch(adapter: Any, epoch: int) -> None:
    """Tells what `data_adapter` gave which epoch comes next.

    Since 3.16 Keras shuffles arrays and the batches of a PyDataset by a count of its own, which
    would start over where a run is resumed. Earlier releases took random generators, and no count.
    """
    if hasattr(adapter, "_epoch"):
        adapter._epoch = epoch + 1  # Keras has counted one when the first begins.


class PyDatasetBatches(PyDatasetAdapter):
    """Keras' adapter of a `keras.utils.PyDataset`, whose batches a subclass may hand on its way."""

    def __init__(
        self, dataset: keras.utils.PyDataset, class_weight: dict[int, float] | None = None
    ):
        super().__init__(dataset, class_weight=class_weight)

    def raw(self) -> Iterable[Any]:
        """Returns one pass over the batches as Keras makes them of the dataset."""
        return super()._get_iterator()

    def handed(self) -> Iterator[Any]:
        """Returns one pass over the batches as the steps of every backend take them."""
        return iter(self.raw())

    def as_batch(self, batch: Tree) -> Any:
        """Returns the tuple (x, y, sample_weight) that Keras makes of what a dataset gives."""
        return self._standardize_batch(batch)

    def _get_iterator(self) -> Iterator[Any]:
        return self.handed()


def given_data(adapter: object) -> Any:
    """Returns the loader that Keras' adapter was made of; None for arrays."""
    return next(
        (held for name in _HELD if (held := getattr(adapter, name, None)) is not None), None
    )


def makes_ahead(adapter: object) -> bool:
    """Returns whether Keras' own workers ask a PyDataset for its batches."""
    return getattr(adapter, "enqueuer", None) is not None


def seek(adapter: Any, batch: int) -> Callable[[], None]:
    """Has the next pass over a PyDataset begin with its batch of this number.

    Args:
        adapter: whose batches Keras does not ask for in workers. The random numbers of the pass'
            order are drawn here.
        batch: from 0, in the order of the pass.

    Returns:
        What undoes it, which also the end of the pass does.
    """
    dataset, shuffle = adapter.py_dataset, adapter.shuffle
    numbers = None
    if (count := dataset.num_batches) is not None:
        numbers = list(range(count))
        if shuffle:
            adapter.py_dataset = _Numbers(count)
            numbers = [int(number) for (number,) in adapter._finite_generator()]

    def undo() -> None:
        adapter.py_dataset, adapter.shuffle = dataset, shuffle

    adapter.py_dataset, adapter.shuffle = _Rest(dataset, numbers, batch, undo), False
    return undo


class _Numbers(keras.utils.PyDataset):
    """Batches that are nothing but their numbers, so that Keras tells their order."""

    def __init__(self, count: int):
        super().__init__()
        self._count = count

    @property
    def num_batches(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return np.array(index)


class _Rest(keras.utils.PyDataset):
    """The last batches of one pass over a PyDataset."""

    def __init__(
        self, dataset: Any, numbers: list[int] | None, first: int, over: Callable[[], None]
    ):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._numbers, self._first, self._over = dataset, numbers, first, over

    @property
    def num_batches(self) -> int | None:
        return None if self._numbers is None else len(self._numbers) - self._first

    def __getitem__(self, index: int) -> Any:
        number = index + self._first
        return self._dataset[number if self._numbers is None else self._numbers[number]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._over()
        self._dataset.on_epoch_end()
