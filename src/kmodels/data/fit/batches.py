"""Batches of things that Keras does not know, in two shapes that it does.

`IndexedBatches` is for what can be asked for samples by number, `Stream` for what can only be gone
through. Both reach every backend by the way of Keras' PyDataset.
"""

import copy
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.data.fit.data_wait import DataWaitTimer
from kmodels.data.fit.feed import DatasetAdapter, workers_of
from kmodels.data.fit.rows import rows_within
from kmodels.data.rng import order

Preprocess = Callable[..., Any]

_forks_safely = getattr(backend_module("kmodels.data.fit.device_put"), "FORKS", False)

# Names that data sets of pictures give their columns, the first found of each.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
LABEL_KEYS = ("label", "labels", "fine_label", "y")


def as_tuple(batch: Any) -> tuple:
    """(x,), (x, y) or (x, y, sample_weight) from what a loader gave.

    Of named columns the label is y, and x the picture where there is one, else all other columns,
    a model's named inputs. A list of texts is x, since loaders collate texts so.
    """
    if isinstance(batch, dict):
        image = next((key for key in IMAGE_KEYS if key in batch), None)
        label = next((key for key in LABEL_KEYS if key in batch), None)
        apart = {label, "sample_weight"}
        inputs = {key: value for key, value in batch.items() if key not in apart}
        if label is None or not inputs:
            return (batch,)
        weight = (batch["sample_weight"],) if "sample_weight" in batch else ()
        return (inputs if image is None else batch[image], batch[label], *weight)
    if not isinstance(batch, tuple | list) or (batch and all(map(_is_text, batch))):
        return (batch,)
    if not 1 <= len(batch) <= 3:
        raise InputError(
            f"the data gave {len(batch)} things per batch; give (x,), (x, y) or "
            "(x, y, sample_weight)"
        )
    return tuple(batch)


def _is_text(part: Any) -> bool:
    return isinstance(part, str | bytes)


def to_numpy(thing: Any) -> Any:
    """Arrays of any framework, pictures and nested lists of them, as NumPy arrays."""
    if isinstance(thing, dict):
        return {key: to_numpy(value) for key, value in thing.items()}
    if isinstance(thing, tuple):
        return tuple(map(to_numpy, thing))
    if isinstance(thing, list):
        parts = [to_numpy(part) for part in thing]
        if len({np.shape(part) for part in parts}) > 1:
            raise InputError(
                "samples of one batch differ in size; make them equal first, or use ImageLoader"
            )
        return np.asarray(parts)
    if hasattr(thing, "detach"):  # it may be on another device, and part of a gradient
        thing = thing.detach().cpu()
        if "bfloat16" in str(thing.dtype):  # NumPy has none
            thing = thing.float()
    return np.asarray(thing)


def prepared(batch: tuple, preprocess: Preprocess | None) -> tuple:
    """A batch as Keras takes it: the backend's own tensors stay, all else becomes NumPy."""
    if preprocess is not None:
        # Pictures of one batch may differ in size here; resizing is what preprocessing does.
        x = batch[0]
        x = [to_numpy(picture) for picture in x] if isinstance(x, list) else to_numpy(x)
        done = preprocess(x, *(None if part is None else to_numpy(part) for part in batch[1:]))
        batch = done if isinstance(done, tuple) else (done,)
    return tuple(map(_kept, batch))


def _kept(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _kept(value) for key, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_kept, part))
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return {key: _kept([sample[key] for sample in part]) for key in part[0]}
    if part is None or keras.ops.is_tensor(part):
        return part
    part = to_numpy(part)
    if not part.ndim:
        raise InputError("the data gives single samples; give batches, as its batch(32) makes them")
    return part


class IndexedBatches(keras.utils.PyDataset):
    """Batches of numbered samples in the order of (seed, epoch), on every backend the same.

    Args:
        take: from sample numbers, int (B,), to a batch (x,), (x, y) or (x, y, sample_weight).
        count: number of samples.
        batch_size: samples per batch.
        shuffle: a new order in each epoch.
        seed: of the order.
        preprocess: applied to each batch.

    Attributes:
        samples: in an epoch.
    """

    def __init__(
        self,
        take: Callable[[np.ndarray], tuple],
        count: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        preprocess: Preprocess | None = None,
    ):
        super().__init__()
        if count < 1:
            raise InputError("the data is empty; give at least one sample")
        self.take = take
        self.samples = count
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.preprocess = preprocess
        self._rows = 0, batch_size
        self._orders: tuple[int, np.ndarray] | None = None
        self.handed_out = 0
        self.epoch = 0

    def part(self, start: int, stop: int) -> "IndexedBatches":
        """The same batches, less all rows but these: see `rows_within`."""
        part = copy.copy(self)
        part._rows = start, stop
        return part

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return -(-self.samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Tells which epoch comes next."""
        self.epoch, self.handed_out = epoch, 0

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch where this one was handed out in full."""
        if self.handed_out >= self.num_batches:
            self.set_epoch(self.epoch + 1)

    def __getitem__(self, index: int) -> tuple:
        samples = np.arange(self.samples)
        if self.shuffle:
            if self._orders is None or self._orders[0] != self.epoch:
                self._orders = self.epoch, order(self.samples, self.seed, self.epoch)
            samples = self._orders[1]
        samples = samples[index * self.batch_size : (index + 1) * self.batch_size]
        samples = samples[rows_within(*self._rows, len(samples))]
        self.handed_out = max(self.handed_out, index + 1)
        return prepared(self.take(samples), self.preprocess)


class Stream(DatasetAdapter):
    """Anything that can be gone through, batch by batch, handed to Keras as a data adapter.

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
        super().__init__(_Sample(self._batches, count), class_weight, clock)

    def tuples(self) -> Iterator[tuple]:
        """One pass over the batches as they come, less their preprocessing."""
        return map(as_tuple, started(self.batches))

    def _batches(self) -> Iterator[tuple]:
        for batch in self.tuples():
            yield prepared(batch, self.preprocess)

    def raw(self) -> Iterator[tuple]:
        """One pass over the batches."""
        return (self._standardize_batch(batch) for batch in self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Tells the data, or the sampler it has, which epoch comes next."""
        for thing in (self.batches, getattr(self.batches, "sampler", None)):
            if callable(tell := getattr(thing, "set_epoch", None)):
                tell(epoch)
                return

    def begin(self) -> None:
        """Training begins: batches read until now, to build the model, are given again."""
        super().begin()
        if isinstance(self.batches, OneShot):
            self.batches.begin()


def started(batches: Iterable[Any]) -> Iterator[Any]:
    """`iter`, with workers that are not forked where the backend runs threads.

    Raises:
        InputError: where the data cannot be sent to such workers.
    """
    # A WebLoader of the package webdataset holds a DataLoader.
    loaders = [x for x in getattr(batches, "pipeline", [batches]) if getattr(x, "num_workers", 0)]
    loader = next((x for x in loaders if hasattr(x, "multiprocessing_context")), None)
    chosen = getattr(loader, "multiprocessing_context", None)
    if loader is None or chosen is not None or _forks_safely or not _forks():
        return iter(batches)
    loader.multiprocessing_context = "forkserver"
    try:
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
    """What Keras' adapter asks for to learn shapes: the first batches and how many there are."""

    def __init__(self, batches: Callable[[], Iterator[tuple]], count: int | None):
        super().__init__()
        self._batches = batches
        self._count = count
        self._first: list[tuple] | None = None

    @property
    def num_batches(self) -> int | None:
        """As known."""
        return self._count

    def __getitem__(self, index: int) -> tuple:
        if self._first is None:
            self._first = list(itertools.islice(self._batches(), 2))
            if not self._first:
                raise InputError("the data gave no batch; give at least one")
        # A stream of a single batch: its shape stands for the second one too.
        return self._first[min(index, len(self._first) - 1)]


class OneShot:
    """An iterator or generator, of which no batch is lost to building the model.

    Keras reads a batch or two before training and throws them away. They are kept until `begin`.
    """

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._kept: list[Any] | None = []
        self._again: list[Any] = []
        self._empty = False

    def begin(self) -> None:
        """From here on each batch is given once."""
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
    """A function that gives the batches of an epoch, called anew for each.

    Args:
        function: takes nothing and gives an iterable, as a generator function does.
    """

    def __init__(self, function: Callable[[], Iterable[Any]]):
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function())
