"""Batches that can only be gone through, one after another.

A generator, a loader of another package and a function that makes one all come this way.
"""

import multiprocessing
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kmodels.core.environment import SAFE_PATH, environ_with
from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import as_tuple
from kmodels.data.pipeline.device_put import device_put


class Streamed:
    """Source of batches that can only be gone through: a loader, a generator, a function.

    Args:
        data: gives one batch after another; gone through once an epoch.
        count: number of batches in an epoch, None where that is not known.
        split: makes (x,), (x, y) or (x, y, sample_weight) of what it gives.
        faster: what to do where steps wait for it, if workers are not the way.
    """

    draws = False

    def __init__(
        self,
        data: Iterable[Any],
        count: int | None,
        split: Callable[[Any], tuple] = as_tuple,
        faster: str | None = None,
    ):
        self.data: Any = OneShot(data) if isinstance(data, Iterator) else data
        self.num_batches, self.as_batch, self.faster = count, split, faster
        self.stateful = self.data

    @property
    def seekable(self) -> bool:
        """Whether a pass may begin at any batch, as one over a list of them."""
        return isinstance(self.data, Sequence)

    def begin(self, first: int = 0) -> Iterator[Any]:
        """Begins a pass; at a batch, if the data is a sequence of them."""
        if first:
            return (self.data[number] for number in range(first, len(self.data)))
        return started(self.data)

    def start(self) -> None:
        """Lets training start: batches read until now, to build the model, are given again."""
        if isinstance(self.data, OneShot):
            self.data.begin()

    def set_epoch(self, epoch: int) -> None:
        """Tells the data, or the sampler it has, which epoch comes next."""
        for thing in (self.data, getattr(self.data, "sampler", None)):
            if callable(tell := getattr(thing, "set_epoch", None)):
                tell(epoch)
                return

    def on_epoch_begin(self) -> None:
        """Is told that an epoch begins, which changes nothing."""

    def on_epoch_end(self, taken: int, wanted: int | None) -> None:
        """Is told that an epoch has ended, which changes nothing."""


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
        with environ_with(SAFE_PATH):
            return iter(batches)
    loader.multiprocessing_context = "forkserver"
    try:
        with environ_with(SAFE_PATH):
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


class OneShot:
    """Gives the batches of an iterator or generator, none of them lost to building the model.

    A batch may be read before training, for its shapes alone. What is read is kept until `begin`.
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


# What makes batches faster, where steps wait for them.
FASTER = "give the data set's map_batches a higher concurrency, and its cluster CPUs for that"


class RayBatches:
    """Gives the rows of a Ray Dataset in batches, from its start each time.

    Columns come as NumPy arrays; those of texts, and of arrays that differ in shape, as lists. Ray
    is asked to keep the order of the rows, so that all passes have the same one if what the data
    set is made of has. A resumed run reads the rows before its first batch, and drops them.

    Args:
        dataset: a `ray.data.Dataset`, or an iterator of Ray's over one, as
            `ray.train.get_dataset_shard` returns.
        batch_size: samples per batch.
    """

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset
        self._batch_size = batch_size
        self._first, self._given = 0, 0
        self._last: dict[str, np.ndarray] = {}
        self._expected: int | None = None
        # The execution of an iterator over a part is planned, and not to be changed any more.
        if (context := getattr(dataset, "context", None)) is not None:
            context.execution_options.preserve_order = True

    @property
    def name(self) -> str:
        """The kind of data, for messages."""
        return f"Ray's {type(self._dataset).__name__}"

    @property
    def count(self) -> int | None:
        """The number of batches in an epoch, or None where Ray would have to make all of them."""
        if type(self._dataset).__name__ != "MaterializedDataset":
            return None
        return -(-self._dataset.count() // self._batch_size)

    def __iter__(self) -> Iterator[tuple]:
        skipped, self._first = self._first, 0
        expected, self._expected = self._expected, None
        return self._pass(skipped, expected)

    def _pass(self, skipped: int, expected: int | None) -> Iterator[tuple]:
        self._given = 0
        batches = self._dataset.iter_batches(batch_size=self._batch_size, batch_format="numpy")
        for columns in batches:
            if not any(map(len, columns.values())):
                continue  # Ray's batch of a data set without rows
            self._given, self._last = self._given + 1, columns
            if self._given == skipped and _checksum(columns) != expected:
                break
            if self._given > skipped:
                yield as_tuple({name: _as_list(column) for name, column in columns.items()})
        else:
            if not self._given:
                raise InputError("the data gave no batch; give at least one")
            if self._given >= skipped:
                return
        raise InputError(
            f"{self.name} gives other rows than before the run was stopped, at batch "
            f"{min(self._given, skipped)}; give its random_shuffle a seed, and in a run of several "
            "processes the data set itself, since Ray deals rows out differently in each pass"
        )

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches were given in this pass, and a checksum of the last one."""
        return {"given": self._given, "checksum": _checksum(self._last)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Has the next pass begin behind the batches that were given."""
        self._first, self._expected = state_dict["given"], state_dict["checksum"]


def _as_list(column: np.ndarray) -> Any:
    """Returns a column as it is, or as a list where its cells are objects of their own."""
    return column if column.dtype != object else list(column)


def _checksum(columns: dict[str, np.ndarray]) -> int:
    """Returns a checksum of the first and the last row of a batch."""
    found = 0
    for name, column in columns.items():
        for cell in (column[0], column[-1]):
            array = np.asarray(cell)
            content = repr(cell).encode() if array.dtype == object else array.tobytes()
            found = zlib.crc32(content, zlib.crc32(name.encode(), found))
    return found
