"""Shard: the rows that each process feeds, by one rule for all data and backends.

Shard k of S takes rows [kB/S, (k+1)B/S) of each global batch of B rows, in the order of one
process, so that a step computes the same as there. Training drops a last batch that is not full.
Evaluation and prediction fill it up with rows of weight 0; the weights of the others are a little
more than 1, so that Keras' loss, a mean over all rows, is the mean over the real ones.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.pipeline import arrays
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.data.pipeline.indexed import Numbered
from kmodels.data.pipeline.position import Source
from kmodels.data.pipeline.request import Method
from kmodels.data.pipeline.stream import OneShot
from kmodels.data.rows import rows_within

_made: Counter[str] = Counter()


class Peers(Protocol):
    """The processes of the run, see `kmodels.core.processes`."""

    def count(self) -> int:
        """Returns the number of processes."""
        ...

    def all_gather_object(self, what: str, value: object) -> list[Any]:
        """Returns the values of all processes."""
        ...

    def check_equal(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises `InputError` if facts differ between processes."""
        ...


@dataclass(frozen=True)
class BatchSharding:
    """The rows of each batch that this process takes.

    Args:
        check_batch: raises `InputError` for a global batch that the mesh does not divide.
        shards: S, the number of parts of a batch.
        shard: k, the part of this process.
        own: True if the data has the rows of this process only.
        peers: the processes; None in a run of one process.
    """

    check_batch: Callable[[int], object] = lambda size: None
    shards: int = 1
    shard: int = 0
    own: bool = False
    peers: Peers | None = None

    @property
    def several(self) -> Peers | None:
        """The processes, or None if there is one."""
        return self.peers if self.peers is not None and self.peers.count() > 1 else None

    def rows(self, size: int) -> tuple[int, int]:
        """Returns the first row and the last row + 1 to take of a batch of the data.

        Raises `InputError` if the mesh does not divide the global batch.
        """
        self.check_batch(size * self.shards if self.own else size)
        if self.own:
            return 0, size
        return self.shard * size // self.shards, (self.shard + 1) * size // self.shards


class _Size(NamedTuple):
    """The size of an epoch: batches and samples of the data, and rows of a full batch."""

    batches: int
    samples: int
    rows: int

    def first(self, batches: int | None) -> "_Size":
        count = min(self.batches, batches or self.batches)
        return _Size(count, min(self.samples, count * self.rows), self.rows)


class Shard:
    """The rows of one process of the batches of a source.

    Processes compare the number of their batches and the first one: before training if batches have
    numbers, else as they are read. If each process has its own rows, they compare before each step
    if all have another batch. For evaluation, data of unknown size is read once to count its
    samples.

    Attributes:
        source: the source to read; its loader makes only these rows if it can.
        num_batches: number of batches in an epoch, equal in all processes; None if unknown.
        samples: number of samples of all processes in an epoch, without dropped ones; in predict,
            if unknown, those of the last pass.
        rows: rows of a batch that this process takes.
        fills: True if rows are filled in.

    Raises:
        InputError: if the mesh does not divide a batch, sizes differ, there is no full batch to
            train on, processes have different data, or a generator would have to be read twice.
    """

    def __init__(self, source: Source, rule: BatchSharding, use: Method, steps: int | None):
        self._rule, self._use, self._steps = rule, use, steps
        _made[use] += 1
        self._name = f"the data to {use}, {_made[use]}"
        self.source = source
        size = _size(source)
        if size is None and (use is Method.EVALUATE or (rule.own and use is Method.PREDICT)):
            size = _counted(source, steps)
        self._count: int | None = None
        self._weight: float | None = None
        self._size = self._there = self.samples = self.rows = 0
        if size is not None:
            self._take_up(size)
        self.fills = self._weight not in (None, 1.0)
        numbered = isinstance(source, Numbered)
        self._is_part = numbered and size is not None and hasattr(source.data, "part")
        whole = source.data
        if self._is_part:
            self.source = Numbered(whole.part(*rule.rows(self._size)))
        elif isinstance(source, Numbered):
            source.last = self._count  # a short one
        if (peers := rule.several) is not None:
            facts: dict[str, Any] = {"the number of batches": self.num_batches}
            if numbered:
                facts["the batch size"] = self._size
            if not rule.own:
                facts["the number of samples"] = self.samples
                if numbered:
                    facts["the first batch"] = _first(whole)
            peers.check_equal(self._name, facts)

    def _take_up(self, size: _Size) -> None:
        rule, use = self._rule, self._use
        start, stop = rule.rows(size.rows)
        self.rows, self._size = stop - start, size.rows
        if use is Method.FIT:
            self._count = size.samples // size.rows
            self.samples = self._count * size.rows
            if not self._count:
                raise InputError(
                    f"the data has {size.samples} samples and a batch {size.rows}; give a smaller "
                    "batch_size: over a mesh only full batches are trained on"
                )
            return
        batches, self._there, full = size.first(self._steps)
        samples = self._there
        if rule.own and rule.peers is not None:
            sizes = rule.peers.all_gather_object("samples to evaluate", [batches, samples])
            copies = max(len(sizes) // rule.shards, 1)
            batches, samples = max(one[0] for one in sizes), sum(one[1] for one in sizes) // copies
            full *= rule.shards
        self._count, self.samples = batches, samples
        if use is Method.EVALUATE:
            self._weight = batches * full / samples

    @property
    def num_batches(self) -> int | None:
        """Number of batches left in an epoch."""
        if self._use is not Method.FIT or self._count is None or not self._is_part:
            return self._count
        # A loader that continues within an epoch has fewer batches.
        left_out = bool(self.source.data.samples % self._size)
        return self.source.data.num_batches - left_out

    def of(self, batches: Iterator[tuple], prepare: Callable[[tuple], tuple]) -> Iterator[tuple]:
        """Yields this process's rows of each batch of a pass, prepared."""
        if self._use is Method.FIT:
            return self._trained(batches, prepare)
        return self._filled(islice(batches, self._steps), prepare)

    def _trained(
        self, batches: Iterator[tuple], prepare: Callable[[tuple], tuple]
    ) -> Iterator[tuple]:
        if self._is_part:
            yield from map(prepare, islice(batches, self.num_batches))
            return
        numbered, count = isinstance(self.source, Numbered), 0
        peers, own = self._rule.several, self._rule.own
        for batch in self._without_short(batches, numbered):
            if peers is not None and own:
                self._agree(peers, count, ended=False)
            elif peers is not None and not count and not numbered:
                peers.check_equal(self._name, {"the first batch": digest(batch)})
            count += 1
            rows = slice(*self._rule.rows(arrays.length(batch)))
            yield prepare(arrays.take(batch, rows))
        if peers is not None and own:
            self._agree(peers, count, ended=True)
        elif peers is not None and not numbered:
            peers.check_equal(self._name, {"the number of batches": count})

    def _without_short(self, batches: Iterator[tuple], even: bool) -> Iterator[tuple]:
        """Yields batches without a last one that is shorter than the first.

        If they are to be even, another size before it raises `InputError`.
        """
        first, short = 0, None
        for batch in batches:
            if short is not None:
                if even:
                    raise _uneven(arrays.length(short), first)
                yield short
            size, short = arrays.length(batch), None
            first = first or size
            if even and size > first:
                raise _uneven(size, first)
            if size < first:
                short = batch
            else:
                yield batch

    def _agree(self, peers: Peers, count: int, ended: bool) -> None:
        all_ended = peers.all_gather_object(self._name, ended)
        if any(all_ended) and not all(all_ended):
            short = ", ".join(str(index) for index, one in enumerate(all_ended) if one)
            raise InputError(
                f"{self._name} ends after {count} batches on process {short} and continues on "
                "others; give each as many, or all of them all the data"
            )

    def _filled(
        self, batches: Iterator[tuple], prepare: Callable[[tuple], tuple]
    ) -> Iterator[tuple]:
        full, seen, there, size = self._size, 0, 0, 0
        batch: Any = None
        for batch in batches:
            if seen and size < full:
                raise _uneven(size, full)
            is_part = self._is_part
            size = min(self._there - seen * full, full) if is_part else arrays.length(batch)
            full, seen, there = full or size, seen + 1, there + size
            if size > full:
                raise _uneven(size, full)
            if not self._rule.own:
                # Before the yield: who knows the number of batches requests no further one.
                self.samples = there
            yield self._fill(batch, prepare, full, size)
        # With its own data, a process may have fewer batches than others.
        for _ in range(seen, self._count or 0 if self._rule.own else 0):
            yield self._fill(batch, prepare, full, 0)

    def _fill(self, batch: tuple, prepare: Callable[[tuple], tuple], full: int, real: int) -> tuple:
        start, stop = self._rule.rows(full)
        self.rows = stop - start
        if not self._is_part:
            batch = arrays.take(batch, rows_within(start, stop, arrays.length(batch)))
        return filled(prepare(batch), self.rows, real - start, self._weight)


def filled(batch: tuple, wanted: int, real: int, weight: float | None) -> tuple:
    """Returns a batch with the same number of rows in every process, and weights for filled ones.

    Args:
        batch: (x,), (x, y) or (x, y, sample_weight) of at least one row.
        wanted: number of rows to return.
        real: number of them that are samples; the others repeat rows.
        weight: weight of a sample; 1 if no row of the epoch is filled in, None for no weights.

    Returns:
        The batch; weights are float32 (wanted,) if it had none.
    """
    there = len(keras.tree.flatten(batch)[0])
    if there != wanted:
        rows = np.arange(wanted) % there
        batch = _each(lambda leaf: to_numpy(leaf)[rows], batch)
    if weight is None or weight == 1.0:
        return batch
    factors = np.where(np.arange(wanted) < real, weight, 0.0).astype("float32")
    if len(batch) < 3 or batch[2] is None:
        return (*batch[:2], *(None,) * (2 - len(batch)), factors)

    def scaled(leaf: np.ndarray) -> np.ndarray:
        own = to_numpy(leaf)
        return own * factors.reshape(-1, *(1,) * (own.ndim - 1))

    return (*batch[:2], _each(scaled, batch[2]))


def digest(batch: Tree) -> str:
    """Returns a short hash of a batch, for processes to compare."""
    sha = hashlib.sha256()
    for leaf in keras.tree.flatten(batch):
        if leaf is not None:
            values = to_numpy(leaf) if hasattr(leaf, "shape") else np.asarray(leaf, dtype=object)
            sha.update(f"{values.dtype} {values.shape}".encode())
            objects = values.dtype == object
            sha.update(repr(values.tolist()).encode() if objects else values.tobytes())
    return sha.hexdigest()[:16]


def _each(change: Callable[[Any], Any], tree: Tree) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else change(leaf), tree)


def _uneven(size: int, first: int) -> InputError:
    return InputError(
        f"a batch has {size} rows and the first {first}; give batches of one size, of which the "
        "last alone may be shorter"
    )


def _first(data: Any) -> str:
    source = getattr(getattr(data, "maker", None), "source", None)
    if source is None:
        return digest(data[0])
    # Labels identify a set of images, and need no decoding.
    return digest((source.labels, data.maker.order(0)[: data.batch_size]))


def _size(source: Source) -> _Size | None:
    """Returns the size of an epoch, or None if the data would have to be read for it."""
    data, count = source.data, source.num_batches
    if hasattr(data, "part"):
        return _Size(data.num_batches, data.samples, data.batch_size)
    # A DataLoader whose sampler has a length.
    size, sampler = getattr(data, "batch_size", None), getattr(data, "sampler", None)
    if size and sampler is not None and hasattr(sampler, "__len__"):
        samples = len(sampler)
        samples -= samples % size if getattr(data, "drop_last", False) else 0
        return _Size(-(-samples // size), samples, size)
    if isinstance(source, Numbered) and count is None:
        raise InputError(
            f"{type(data).__name__} has no end; over a mesh give it num_batches, or give a "
            "function that gives its batches"
        )
    if count is None:
        return None
    if arrays.is_tf_data(data):  # batches of known size are full
        shape = keras.tree.flatten(data.element_spec)[0].shape
        rows = shape[0] if shape.rank else None
        return None if rows is None else _Size(count, count * rows, rows)
    if not hasattr(data, "__getitem__"):
        return None
    first, last = (arrays.length(source.as_batch(data[number])) for number in (0, count - 1))
    if last > first:
        raise _uneven(last, first)
    return _Size(count, (count - 1) * first + last, first)


def _counted(source: Source, steps: int | None) -> _Size:
    """Returns the size of an epoch after reading one."""
    if isinstance(source.data, OneShot):
        raise InputError(
            "a generator cannot be evaluated over several devices, since its samples are counted "
            "first; give a function that makes the generator"
        )
    sizes = [arrays.length(source.as_batch(batch)) for batch in islice(source.begin(), steps)]
    if not sizes:
        raise InputError("the data gave no batch; give at least one")
    return _Size(len(sizes), sum(sizes), sizes[0])
