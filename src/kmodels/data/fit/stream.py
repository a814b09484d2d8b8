"""Batches that can only be gone through, one after another: `Stream`.

A generator, a loader of another package and a function that makes one all come this way, and reach
every backend as Keras' adapter of a PyDataset does.
"""

import itertools
import multiprocessing
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.python_children import safe_path
from kmodels.data.fit.batches import Preprocess, as_tuple, prepared
from kmodels.data.fit.data_wait import DataWaitTimer
from kmodels.data.fit.device_put import device_put
from kmodels.data.fit.feed import DatasetAdapter, workers_of

Batches = Callable[[], Iterator[tuple]]


class Stream(DatasetAdapter):
    """Hands anything that can be gone through, batch by batch, to Keras as a data adapter.

    Args:
        batches: gives one batch after another; gone through once an epoch.
        count: number of batches in an epoch, None where that is not known.
        preprocess: applied to each batch.
        class_weight: as in `keras.Model.fit`.
        faster: what to do where steps wait for it, if workers are not the way.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        count: int | None,
        preprocess: Preprocess | None = None,
        class_weight: dict[int, float] | None = None,
        faster: str | None = None,
    ):
        if isinstance(batches, Iterator):
            batches = OneShot(batches)
        self.batches = batches
        self.preprocess = preprocess
        clock = DataWaitTimer(*workers_of(batches), faster)
        # Not in a circle: a DataLoader that is left to the garbage collector waits 5 s for each of
        # its workers, while one that nothing holds any more ends them at once.
        sample = _Sample(weakref.WeakMethod(self._batches), count)
        super().__init__(sample, class_weight, clock)

    def tuples(self) -> Iterator[tuple]:
        """Returns one pass over the batches as they come, not preprocessed."""
        return map(as_tuple, started(self.batches) if self._tracked is None else self._tracked)

    def track(self, wrap: Callable[[Any, Callable[[Any], Iterator[Any]], bool], Any]) -> Any:
        """See `DatasetAdapter.track`."""
        self._tracked = wrap(self.batches, started, False)
        return self._tracked

    def _batches(self) -> Iterator[tuple]:
        for batch in self.tuples():
            yield prepared(batch, self.preprocess)

    def raw(self) -> Iterator[tuple]:
        """Returns one pass over the batches."""
        return (self.as_batch(batch) for batch in self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Tells the data, or the sampler it has, which epoch comes next."""
        for thing in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(tell := getattr(thing, "set_epoch", None)):
                tell(epoch)
                return

    def begin(self) -> None:
        """Lets training begin: batches read until now, to build the model, are given again."""
        super().begin()
        if isinstance(self.batches, OneShot):
            self.batches.begin()


def started(batches: Iterable[Any]) -> Iterator[Any]:
    """Returns `iter` of batches, whose workers are not forked where the backend runs threads.

    Raises:
        InputError: where the data cannot be sent to such workers.
    """
    # A WebLoader of the package webdataset holds a DataLoader.
    loaders = [x for x in getattr(batches, "pipeline", [batches]) if getattr(x, "num_workers", 0)]
    loader = next((x for x in loaders if hasattr(x, "multiprocessing_context")), None)
    chosen = getattr(loader, "multiprocessing_context", None)
    if loader is None or chosen is not None or device_put.FORKS or not _forks():
        with safe_path():
            return iter(batches)
    loader.multiprocessing_context = "forkserver"
    try:
        with safe_path():
            return iter(batches)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"the data cannot be sent to workers ({error}); put what it uses in a module, or set "
            "num_workers to 0"
        ) from error
    finally:
        loader.multiprocessing_context = None


def _forks() -> bool:
    default = multiprocessing.get_all_start_methods()[0]
    return (multiprocessing.get_start_method(allow_none=True) or default) == "fork"


class _Sample(keras.utils.PyDataset):
    """Tells Keras' adapter the shapes of the first batches and how many there are."""

    def __init__(self, batches: "weakref.WeakMethod[Batches]", count: int | None):
        super().__init__()
        self._batches = batches
        self._count = count
        self._first: list[tuple] | None = None

    @property
    def num_batches(self) -> int | None:
        """Returns how many there are, or None where that is not known."""
        return self._count

    def __getitem__(self, index: int) -> tuple:
        if self._first is None:
            begin = self._batches()
            assert begin is not None  # the stream asks, through Keras
            self._first = list(itertools.islice(begin(), 2))
            if not self._first:
                raise InputError("the data gave no batch; give at least one")
        # A stream of a single batch: its shape stands for the second one too.
        return self._first[min(index, len(self._first) - 1)]


class OneShot:
    """Gives the batches of an iterator or generator, none of them lost to building the model.

    Keras reads a batch or two before training and throws them away. They are kept until `begin`.
    """

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self.name = type(iterator).__name__
        self._kept: list[Any] | None = []
        self._again: list[Any] = []
        self._empty = False

    def begin(self) -> None:
        """Gives each batch once from here on."""
        if self._kept is not None:
            self._again, self._kept = self._kept, None

    def __iter__(self) -> Iterator[Any]:
        if self._kept is not None:
            yield from list(self._kept)
        if self._empty and not self._again and self._kept is None:
            raise InputError(
                "the generator is used up; give steps_per_epoch, or data that can be gone through "
                "again in each epoch"
            )
        while self._again:
            yield self._again.pop(0)
        for batch in self._iterator:
            if self._kept is not None:
                self._kept.append(batch)
            yield batch
        self._empty = True


class Calls:
    """Calls a function again for the batches of each epoch.

    Args:
        function: takes nothing and gives an iterable, as a generator function does.
    """

    def __init__(self, function: Callable[[], Iterable[Any]]):
        self._function = function

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self._function, "__name__", "a function")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function())


class Chunks:
    """Gives a Hugging Face IterableDataset in batches, from its start each time.

    Args:
        dataset: dataset of single samples.
        batch_size: samples per batch.
    """

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple]:
        for batch in self._dataset.iter(self._batch_size):
            yield as_tuple(batch)

    def set_epoch(self, epoch: int) -> None:
        """Tells the dataset which order comes next."""
        self._dataset.set_epoch(epoch)
