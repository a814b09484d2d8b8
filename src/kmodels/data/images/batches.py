"""One batch from its number: a pure function of source, settings, epoch and number.

Workers run this, so it imports no framework.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.augment import Augment, crop_and_resize
from kmodels.data.images.pictures import with_channels
from kmodels.data.images.resizing import USUAL, Resizing
from kmodels.data.images.sources import ImageSource, check_labels
from kmodels.data.rng import order
from kmodels.data.rows import rows_within


@dataclass
class BatchMaker:
    """Everything that decides what is in a batch. Picklable. See `loader.ImageLoader`."""

    source: ImageSource
    batch_size: int
    shuffle: bool
    seed: int
    augment: Augment | None
    preprocess: Callable[[np.ndarray], np.ndarray] | None
    drop_last: bool
    image_size: tuple[int, int] | None
    channels: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    one_hot: int | None
    resizing: Resizing = USUAL
    rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not len(self.source):
            raise InputError("the data is empty; give at least one image")
        check_whole("batch_size", self.batch_size)
        if self.drop_last and len(self.source) < self.batch_size:
            raise InputError(
                f"drop_last leaves nothing of {len(self.source)} images in batches of "
                f"{self.batch_size}; give a smaller batch_size"
            )
        if min(self.std) <= 0:
            raise InputError(f"std is {self.std}; give numbers above 0")
        if self.one_hot:
            check_labels(np.asarray(self.source.labels), self.one_hot, "data")

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        count = len(self.source)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_orders"}

    def order(self, epoch: int) -> np.ndarray:
        """Returns sample numbers in the order of this epoch."""
        if not self.shuffle:
            return np.arange(len(self.source))
        found = self._orders.get(epoch)
        if found is None:
            found = order(len(self.source), self.seed, epoch)
            # The end of one epoch and the start of the next are asked for in turn.
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = found
        return found

    def make(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns batch `number` of an epoch, or those `rows` of it.

        Returns:
            float32 images (B, H, W, C), and int32 labels (B,), or float32 (B, one_hot).
        """
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(self.source))
        if not 0 <= start < stop:
            raise IndexError(f"batch {number} of {self.batches}")
        if self.rows is not None:
            within = rows_within(*self.rows, stop - start)
            start, stop = start + within.start, start + within.stop
        mixes = self.augment is not None and self.augment.mixes
        # Pairs that mix stand at places 2k and 2k + 1; an odd batch size cuts one in two, so that
        # its other half has to be made too.
        low = start - start % 2 if mixes else start
        high = min(stop + stop % 2, len(self.source)) if mixes else stop
        samples = self.order(epoch)[low:high]
        images, labels = self.pictures(epoch, samples)
        if self.one_hot:
            labels = (labels[:, None] == np.arange(self.one_hot)).astype("float32")
        if self.augment is not None:
            self.augment.erase(images, self.seed, epoch, samples)
            pairs = np.arange(low // 2, high // 2)
            images, labels = self.augment.mix(images, labels, self.seed, epoch, pairs)
        return images[start - low : stop - low], labels[start - low : stop - low]

    def pictures(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images decoded, cropped, resized, augmented and normalised, and labels."""
        pictures, labels = self.source.batch(samples)
        augment, size = self.augment, self.image_size
        if augment is not None and augment.random_resized_crop is not None:
            shapes = np.array([picture.shape[:2] for picture in pictures])
            boxes = augment.boxes(shapes, self.seed, epoch, samples)
            pictures = crop_and_resize(pictures, boxes, size or tuple(shapes[0]), self.resizing)
        elif (
            isinstance(pictures, list)
            or (size and pictures.shape[1:3] != tuple(size))
            or self.resizing.resize_size is not None
        ):
            if size is None and len({picture.shape for picture in pictures}) > 1:
                raise InputError("images differ in size; give image_size")
            pictures = np.stack([self.resizing(p, size or p.shape[:2]) for p in pictures])
        images = with_channels(pictures, self.channels or pictures.shape[-1])
        if augment is not None:
            mean, _ = self._statistics(images.shape[-1])
            images = augment.pixels(images, self.seed, epoch, samples, mean)
        if self.preprocess is not None:
            return np.asarray(self.preprocess(images), "float32"), labels
        return self._normalise(images), labels

    def _statistics(self, channels: int) -> tuple[np.ndarray, np.ndarray]:
        mean, std = np.array(self.mean, "float32"), np.array(self.std, "float32")
        if {mean.size, std.size} - {1, channels}:
            raise InputError(
                f"mean has {mean.size} and std {std.size} values for {channels} channels; "
                "give one, or one per channel"
            )
        return mean, std

    def _normalise(self, images: np.ndarray) -> np.ndarray:
        mean, std = self._statistics(images.shape[-1])
        # One multiplication and one addition, in place: the batch is written twice, not four times.
        result = np.multiply(images, np.float32(1 / 255) / std, dtype="float32")
        result -= mean / std
        return result
