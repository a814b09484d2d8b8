"""RayBatches: the rows of a Ray Dataset, batch by batch."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.pipeline.batch import as_tuple

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
