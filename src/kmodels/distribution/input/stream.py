"""One process's rows of batches that come one after another."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.fit import arrays
from kmodels.data.fit.batches import Preprocess, as_tuple, prepared
from kmodels.data.fit.request import Method
from kmodels.data.fit.rows import rows_within
from kmodels.data.fit.stream import OneShot, Stream
from kmodels.distribution import processes
from kmodels.distribution.input.sharding_rule import (
    BatchSharding,
    digest,
    filled,
    length,
    uneven,
)


class ShardedStream(Stream):
    """Gives the rows of one process of batches that come one after another.

    The batches of several processes are compared as they come: the first batch and the number of
    all, or, if each process has its own rows, whether all have another batch before each step.

    Args:
        stream: stream of all rows, or of this process's own.
        rule: what to take.
        use: what it is for. Evaluation goes through the stream once to count its samples if they
            are not known.
        name: what processes call it.
        steps: batches to end after, in evaluate and predict.

    Attributes:
        samples: number of samples of all processes; in predict those that came in the last pass.
        rows: rows of a batch that this process takes, in evaluate and predict.
        fills: whether there are rows that stand for none.

    Raises:
        InputError: where the mesh does not divide a batch, sizes differ, a generator would have to
            be gone through twice, or, while it is gone through, processes have other data.
    """

    def __init__(
        self, stream: Stream, rule: BatchSharding, use: Method, name: str, steps: int | None = None
    ):
        self._rule, self._use, self._name, self._steps = rule, use, name, steps
        self.tuples = stream.tuples
        self._weight: float | None = None
        self._size = self.samples = self.rows = 0
        count = stream.num_batches
        if use is Method.FIT:
            count = None if count is None else _full(stream.batches, count)
        elif use is Method.EVALUATE or rule.own:
            count, there, self._size = _counted(stream, steps)
            rule.rows(self._size)
            count, self.samples, weight = rule.extent(count, there, self._size)
            self._weight = weight if use is Method.EVALUATE else None
        self.fills = self._weight not in (None, 1.0)
        settings = stream.preprocess, stream.class_weight, stream.clock.faster
        super().__init__(stream.batches, count, *settings)
        self._all = stream

    def track(self, wrap: Callable[[Any, Callable[[Any], Iterator[Any]], bool], Any]) -> Any:
        """See `DatasetAdapter.track`: it is the stream of all rows that is gone through."""
        return self._all.track(wrap)

    def prepared_by(self, preprocess: Preprocess | None) -> "ShardedStream":
        """Takes a model's preprocessor, where there is none yet."""
        self.preprocess = self.preprocess or preprocess
        return self

    def _batches(self) -> Iterator[tuple]:
        return self._trained() if self._use is Method.FIT else self._filled()

    def _trained(self) -> Iterator[tuple]:
        count, own, many = 0, self._rule.own, processes.count() > 1
        for batch in _without_short(self.tuples()):
            rows = slice(*self._rule.rows(length(batch)))
            if many and own:
                self._agree(count, ended=False)
            elif many and not count:
                processes.check_equal(self._name, {"the first batch": digest(batch)})
            count += 1
            yield prepared(arrays.take(batch, rows), self.preprocess)
        if many and own:
            self._agree(count, ended=True)
        elif many:
            processes.check_equal(self._name, {"the number of batches": count})

    def _agree(self, count: int, ended: bool) -> None:
        told = processes.all_gather_object(self._name, ended)
        if any(told) and not all(told):
            short = ", ".join(str(index) for index, one in enumerate(told) if one)
            raise InputError(
                f"{self._name} ends after {count} batches on process {short} and continues on "
                "others; give each as many, or all of them all the data"
            )

    def _filled(self) -> Iterator[tuple]:
        full, seen, there, size = self._size, 0, 0, 0
        batch: Any = None
        for batch in islice(self.tuples(), self._steps):
            if seen and size < full:
                raise uneven(size, full)
            size = length(batch)
            full, seen, there = full or size, seen + 1, there + size
            if size > full:
                raise uneven(size, full)
            if not self._rule.own:
                # Now: who knows how many batches there are does not ask for one more.
                self.samples = there
            yield self._fill(batch, full, size)
        if self._rule.own:
            for _ in range(seen, self.num_batches or 0):
                yield self._fill(batch, full, 0)

    def _fill(self, batch: tuple, full: int, real: int) -> tuple:
        start, stop = self._rule.rows(full)
        self.rows = stop - start
        there = rows_within(start, stop, length(batch))
        done = prepared(arrays.take(batch, there), self.preprocess)
        return filled(done, self.rows, real - start, self._weight)


def _without_short(source: Iterator[tuple]) -> Iterator[tuple]:
    """Gives batches, less a last one that is shorter than the first."""
    first, held = 0, None
    for batch in source:
        if held is not None:
            yield held
        first, held = first or length(batch), None
        if length(batch) < first:
            held = batch
        else:
            yield batch


def _full(batches: Any, count: int) -> int | None:
    """Returns how many of `count` batches `_without_short` gives, or None if that is unknown."""
    if getattr(batches, "drop_last", False):  # a DataLoader's
        return count
    if (known := _samples(batches)) is not None:
        return known[0] // known[1]
    if hasattr(batches, "element_spec"):  # tf.data's; a batch of known size is a full one
        shape = _first_leaf(batches.element_spec).shape
        return count if shape.rank and shape[0] is not None else None
    if hasattr(batches, "__getitem__"):
        sizes = [length(as_tuple(batches[number])) for number in (0, count - 1)]
        return count - (sizes[1] < sizes[0])
    return None


def _samples(batches: Any) -> tuple[int, int] | None:
    """Returns samples and batch size of a DataLoader whose sampler knows them."""
    size, sampler = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
    try:
        return (len(sampler), size) if size else None  # type: ignore[arg-type]
    except TypeError:
        return None


def _counted(stream: Stream, steps: int | None) -> tuple[int, int, int]:
    """Returns the numbers of batches, of samples, and of rows of a full batch."""
    if (known := _samples(batches := stream.batches)) is not None:
        samples, size = known
        if getattr(batches, "drop_last", False):
            samples -= samples % size
        samples = min(samples, (steps or samples) * size)
        return -(-samples // size), samples, size
    if isinstance(batches, OneShot):
        raise InputError(
            "a generator cannot be evaluated over several devices, since its samples are counted "
            "first; give a function that makes the generator"
        )
    sizes = [length(batch) for batch in islice(stream.tuples(), steps)]
    if not sizes:
        raise InputError("the data gave no batch; give at least one")
    return len(sizes), sum(sizes), sizes[0]


def _first_leaf(spec: Tree) -> Any:
    while isinstance(spec, tuple | list | dict):
        spec = next(iter(spec.values())) if isinstance(spec, dict) else spec[0]
    return spec
