"""Batches without numbers, which are read one after another.

They come from generators, loaders of other packages, and functions that make these.
"""

import multiprocessing
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kmodels.core.environment import SAFE_PATH, environ_with
from kmodels.core.errors import InputError
from kmodels.data.pipeline.arrays import as_tuple
from kmodels.data.pipeline.device_put import device_put
from kmodels.data.pipeline.position import Source


class Streamed(Source):
    """Source of batches that are read one after another: a loader, a generator, a function."""

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
        """True if a pass may begin at any batch, as for a list of them."""
        return isinstance(self.data, Sequence)

    def begin(self, first: int = 0) -> Iterator[Any]:
        """See `Source`; a sequence of batches may begin at any of them."""
        if first:
            return (self.data[number] for number in range(first, len(self.data)))
        return started(self.data)

    def start(self) -> None:
        """Starts training: batches that were read before, to build the model, are repeated."""
        if isinstance(self.data, OneShot):
            self.data.begin()

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch of the data, or of its sampler."""
        for thing in (self.data, getattr(self.data, "sampler", None)):
            if callable(tell := getattr(thing, "set_epoch", None)):
                tell(epoch)
                return


def started(batches: Iterable[Any]) -> Iterator[Any]:
    """Returns `iter(batches)`; its workers are not forked if the backend runs threads.

    Raises `InputError` if the data cannot be sent to such workers.
    """
    # A WebLoader of the webdataset package contains a DataLoader.
    loaders = [x for x in getattr(batches, "pipeline", [batches]) if getattr(x, "num_workers", 0)]
    loader = next((x for x in loaders if hasattr(x, "multiprocessing_context")), None)
    context = getattr(loader, "multiprocessing_context", None)
    if loader is None or context is not None or device_put.FORKS or not _forks():
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
    """The batches of an iterator or generator, of which building the model uses up none.

    Batches that are read before training, for their shapes, are repeated after `begin`.
    """

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self.name = type(iterator).__name__
        self._kept: list[Any] | None = []
        self._again: list[Any] = []
        self._empty = False

    def begin(self) -> None:
        """Yields each batch once from now on."""
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
    """Calls a function, such as a generator function, for the batches of each epoch."""

    def __init__(self, function: Callable[[], Iterable[Any]]):
        self._function = function

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self._function, "__name__", "a function")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function())


class Chunks:
    """Batches of a Hugging Face IterableDataset of samples, from its start in each pass."""

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[tuple]:
        for batch in self._dataset.iter(self._batch_size):
            yield as_tuple(batch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the order of the next pass."""
        self._dataset.set_epoch(epoch)


# How to make batches faster, if steps wait for them.
FASTER = "give the data set's map_batches a higher concurrency, and its cluster CPUs for that"


class RayBatches:
    """Batches of the rows of a Ray Dataset, or of `ray.train.get_dataset_shard`, pass by pass.

    Columns are NumPy arrays; those of texts, and of arrays of different shapes, are lists. Ray
    preserves the order of rows, so all passes have the same order if the data set is deterministic.
    A resumed run reads the rows before its first batch, and drops them.
    """

    def __init__(self, dataset: Any, batch_size: int):
        self._dataset = dataset
        self._batch_size = batch_size
        self._first, self._given = 0, 0
        self._last: dict[str, np.ndarray] = {}
        self._expected: int | None = None
        # The execution of an iterator over a part is planned, and cannot be changed.
        if (context := getattr(dataset, "context", None)) is not None:
            context.execution_options.preserve_order = True

    @property
    def name(self) -> str:
        """Kind of the data, for messages."""
        return f"Ray's {type(self._dataset).__name__}"

    @property
    def count(self) -> int | None:
        """Number of batches in an epoch, or None if Ray would have to compute all of them."""
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
        """Returns the number of batches of this pass that were read, and a checksum of the last."""
        return {"given": self._given, "checksum": _checksum(self._last)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Makes the next pass begin after the batches that were read."""
        self._first, self._expected = state_dict["given"], state_dict["checksum"]


def _as_list(column: np.ndarray) -> Any:
    """Returns a column, as a list if its cells are objects."""
    return column if column.dtype != object else list(column)


def _checksum(columns: dict[str, np.ndarray]) -> int:
    """Returns a checksum of the first and the last row of a batch."""
    checksum = 0
    for name, column in columns.items():
        for cell in (column[0], column[-1]):
            array = np.asarray(cell)
            content = repr(cell).encode() if array.dtype == object else array.tobytes()
            checksum = zlib.crc32(content, zlib.crc32(name.encode(), checksum))
    return checksum
