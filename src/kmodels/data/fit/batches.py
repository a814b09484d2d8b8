"""One batch as Keras takes it, and batches that can be asked for by their number.

`as_tuple` and `prepared` make (x, y, sample_weight) of what any loader gave. `IndexedBatches` are
numbered samples and `Mapped` any PyDataset in such batches; `Stream` has those without a number.
"""

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.fit.rows import rows_within
from kmodels.data.images.pictures import is_pillow
from kmodels.data.rng import order

Preprocess = Callable[..., Any]

# Names that data sets of images give their columns, the first found of each.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
# The names of the images of a record, one or a list; of arrays of images they are others too.
RECORD_IMAGES = ("images", "image")
LABEL_KEYS = ("label", "labels", "fine_label", "y")


def as_tuple(batch: Tree) -> tuple:
    """Returns (x,), (x, y) or (x, y, sample_weight) of what a loader gave.

    Of named columns the label is y, and x the image where there is one, else all other columns,
    a model's named inputs. A list of texts or records is x, since loaders collate them so.
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
    if not isinstance(batch, tuple | list) or (batch and all(map(_is_sample, batch))):
        return (batch,)
    if not 1 <= len(batch) <= 3:
        raise InputError(
            f"the data gave {len(batch)} items per batch; give (x,), (x, y) or "
            "(x, y, sample_weight)"
        )
    return tuple(batch)


def _is_sample(part: object) -> bool:
    """Returns whether it is a text or a record, of which a batch is a list."""
    if isinstance(part, dict):
        return is_record(part) and not _is_numbers(part)
    return isinstance(part, str | bytes)


def _is_numbers(record: dict[str, object]) -> bool:
    return all(isinstance(value, int | float) or value is None for value in record.values())


def is_record(part: object) -> bool:
    """Returns whether it is named texts of one sample, such as a question and an answer.

    Beside them it may have images, in any form.
    """
    if not isinstance(part, dict):
        return False
    texts = [value for name, value in part.items() if name not in RECORD_IMAGES]
    return bool(texts or not part) and all(
        value is None
        or isinstance(value, str | int | float)
        or (isinstance(value, list) and all(isinstance(item, dict) for item in value))
        for value in texts
    )


def to_numpy(thing: Any) -> Any:
    """Returns arrays of any framework, images and nested lists of them as NumPy arrays."""
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
    """Returns a batch as Keras takes it: the backend's own tensors stay, all else is NumPy's."""
    if preprocess is not None:
        # Images of one batch may differ in size here; resizing is what preprocessing does.
        x = _to_preprocess(batch[0])
        done = preprocess(x, *(None if part is None else _labels(part) for part in batch[1:]))
        batch = done if isinstance(done, tuple) else (done,)
    return tuple(map(_kept, batch))


def _to_preprocess(x: Any) -> Any:
    """Returns samples as NumPy arrays; images of Pillow, records and lists in columns stay.

    An array would lose the orientation of an image, and change the bytes or the path of an image in
    a record.
    """
    if isinstance(x, list):
        return [one if is_record(one) or is_pillow(one) else to_numpy(one) for one in x]
    if isinstance(x, dict) and any(_is_texts(part) for part in x.values()):
        return {key: part if isinstance(part, list) else to_numpy(part) for key, part in x.items()}
    return to_numpy(x)


def _labels(part: Any) -> Any:
    """Returns labels as NumPy arrays, and lists of arrays that differ in size as lists of them."""
    if isinstance(part, dict):
        return {key: _labels(value) for key, value in part.items()}
    arrays = isinstance(part, list) and all(hasattr(one, "shape") for one in part)
    if arrays and len({tuple(one.shape) for one in part}) > 1:
        return [to_numpy(one) for one in part]
    return to_numpy(part)


def _is_texts(column: object) -> bool:
    """Returns whether this is a column of texts or messages."""
    while isinstance(column, list) and column:
        column = column[0]
    kind = getattr(getattr(column, "dtype", None), "kind", "")
    return isinstance(column, str | dict) or kind in ("O", "U", "S")


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
    """Gives batches of numbered samples in the order of (seed, epoch), alike on every backend.

    Args:
        take: from sample numbers, int (B,), to a batch (x,), (x, y) or (x, y, sample_weight).
        count: number of samples.
        batch_size: samples per batch.
        shuffle: a new order in each epoch.
        seed: seed of the order.
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
        self._rows: tuple[int, int] | None = None
        self._orders: tuple[int, np.ndarray] | None = None
        self.handed_out = 0
        self.epoch = 0

    def part(self, start: int, stop: int) -> "IndexedBatches":
        """Returns the same batches with these rows alone, see `rows_within`."""
        part = copy.copy(self)
        part._rows = start, stop
        return part

    @property
    def num_batches(self) -> int:
        """Returns how many batches an epoch has."""
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
        if self._rows is not None:
            samples = samples[rows_within(*self._rows, len(samples))]
        self.handed_out = max(self.handed_out, index + 1)
        return prepared(self.take(samples), self.preprocess)


class Mapped(keras.utils.PyDataset):
    """Passes the batches of a PyDataset through a function.

    Args:
        dataset: any; what Keras and `fit` tell about epochs is passed on to it.
        preprocess: called as preprocess(x, y, sample_weight) on each batch, in NumPy.
    """

    def __init__(self, dataset: keras.utils.PyDataset, preprocess: Preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._preprocess = preprocess

    @property
    def num_batches(self) -> int | None:
        """Returns how many batches an epoch has."""
        return self._dataset.num_batches

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple:
        return prepared(as_tuple(self._dataset[index]), self._preprocess)

    def set_epoch(self, *which: int) -> None:
        """Tells a dataset that has `set_epoch` which epoch comes next, see `ImageLoader`."""
        if (tell := getattr(self._dataset, "set_epoch", None)) is not None:
            tell(*which)

    def on_epoch_begin(self) -> None:
        """Passes on that an epoch begins."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes on that an epoch has ended."""
        self._dataset.on_epoch_end()
