"""Image batches by number: pure functions of source, settings, epoch and number.

Workers run this, so it imports no framework.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.augment import Augment, photometric_distortion
from kmodels.data.images.boxes import KEYS, check_objects, cropped, padded
from kmodels.data.images.decoding import with_channels
from kmodels.data.images.resizing import USUAL, Resizing, resize, with_shorter_side
from kmodels.data.images.sources import NO_LABEL, ImageSource, check_labels
from kmodels.data.rng import order, uniforms
from kmodels.data.rows import rows_within

# Largest number of random crops that are drawn until no class has this share of one.
CROPS, LARGEST_CLASS = 11, 0.75
# Distance of the copies of a sample in repeated augmentation, even as the pairs of MixUp are.
APART = 64


@dataclass
class BatchMaker:
    """Makes the batches of an `ImageLoader`, whose arguments these are; it can be pickled.

    Args:
        part: first row and last row + 1 to make of each batch; None for all rows.
    """

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
    repeats: int = 1
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, ImageSource):
            raise InputError(
                f"source is a {type(self.source).__name__}; give images with labels, such as "
                "ArraySource(images, labels) or a split of open_dataset"
            )
        if not len(self.source):
            raise InputError("the data is empty; give at least one image")
        check_whole("batch_size", self.batch_size)
        check_whole("repeats", self.repeats)
        for name in ("channels", "one_hot"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value)
        if self.drop_last and len(self.source) < self.batch_size:
            raise InputError(
                f"drop_last leaves nothing of {len(self.source)} images in batches of "
                f"{self.batch_size}; give a smaller batch_size"
            )
        if not all(0 < value < math.inf for value in self.std):
            raise InputError(f"std is {self.std}; give numbers above 0")
        if not all(map(math.isfinite, self.mean)):
            raise InputError(f"mean is {self.mean}; give finite numbers")
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
        """Returns the sample numbers of an epoch in order, int (n,).

        With repeats, copy c of a sample has its number + c * n, and copies are `APART` places from
        each other, so that MixUp does not mix them.
        """
        if not self.shuffle:
            return np.arange(len(self.source))
        if epoch not in self._orders:
            # Two are kept: workers make batches of two epochs in turn.
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            count = len(self.source)
            samples = order(count, self.seed, epoch)
            if self.repeats > 1:
                copies = count * np.arange(self.repeats)[:, None]
                groups = np.split(samples, range(APART, count, APART))
                samples = np.concatenate([(group + copies).ravel() for group in groups])[:count]
            self._orders[epoch] = samples
        return self._orders[epoch]

    def span(self, number: int) -> tuple[int, int]:
        """Returns the first place and the last place + 1 of a batch in the order of its epoch."""
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(self.source))
        if not 0 <= start < stop:
            raise IndexError(f"batch {number} of {self.batches}")
        if self.part is None:
            return start, stop
        within = rows_within(*self.part, stop - start)
        return start + within.start, start + within.stop

    def make(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns batch `number` of an epoch.

        Images are float32 (B, H, W, C), and labels int32 (B,), or float32 (B, one_hot).
        """
        start, stop = self.span(number)
        mixes = self.augment is not None and self.augment.mixes
        # The samples at places 2k and 2k + 1 are mixed; an odd batch size separates such a pair, so
        # the other half is made too.
        low = start - start % 2 if mixes else start
        high = min(stop + stop % 2, len(self.source)) if mixes else stop
        samples = self.order(epoch)[low:high]
        images, labels = self.pictures(epoch, samples)
        if self.augment is not None:
            self.augment.erase(images, self.seed, epoch, samples)
            pairs = np.arange(low // 2, high // 2)
            images, labels = self.augment.mix(images, labels, self.seed, epoch, pairs)
        return images[start - low : stop - low], labels[start - low : stop - low]

    def pictures(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images (B, H, W, C), float32 and normalised, and labels (B,) or (B, one_hot)."""
        pictures, labels = self.source.batch(samples % len(self.source))
        if self.one_hot:
            labels = (labels[:, None] == np.arange(self.one_hot)).astype("float32")
        augment, size = self.augment, self.image_size
        if augment is not None and augment.random_resized_crop is not None:
            boxes = self._boxes(pictures, epoch, samples)
            pictures = self._cropped(pictures, boxes, size or pictures[0].shape[:2])
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

    def _boxes(self, pictures: Any, epoch: int, samples: np.ndarray) -> list[Any]:
        """Returns the box to crop of each image, (left, top, right, bottom) or None for all."""
        if self.augment is None or self.augment.random_resized_crop is None:
            return [None] * len(samples)
        shapes = np.array([picture.shape[:2] for picture in pictures])
        return self.augment.boxes(shapes, self.seed, epoch, samples).tolist()

    def _cropped(
        self, pictures: Any, boxes: Sequence[Sequence[float] | None], size: tuple[int, int]
    ) -> np.ndarray:
        """Returns the box of each image, all of it for None, resized: (B, *size, C)."""
        parts = [None if box is None else tuple(box) for box in boxes]
        pairs = zip(pictures, parts, strict=True)
        return np.stack([self.resizing(picture, size, part) for picture, part in pairs])

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


@dataclass
class ViewMaker(BatchMaker):
    """Makes batches with several augmentations of each image."""

    views: tuple[Augment, ...] = ()

    def make(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns batch `number` of an epoch, as `BatchMaker` with images (B, V, H, W, C)."""
        start, stop = self.span(number)
        samples = self.order(epoch)[start:stop]
        views, labels = [], np.zeros(0, "int32")
        for view, augment in enumerate(self.views):
            # Each view draws its own numbers for the same images.
            maker = replace(self, augment=augment, seed=self.seed + 7919 * (view + 1))
            images, labels = maker.pictures(epoch, samples)
            augment.erase(images, maker.seed, epoch, samples)
            views.append(images)
        return np.stack(views, axis=1), labels


@dataclass
class MaskMaker(BatchMaker):
    """Makes batches of images and masks, which are cropped and flipped like their images."""

    flip: bool = False
    scale: tuple[float, float] | None = None
    distort: bool = False

    def pictures(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images (B, H, W, C), float32 and normalised, and masks (B, H, W), int32."""
        pictures, masks = self.source.batch(samples)
        size = self.image_size or pictures[0].shape[:2]
        if self.scale is not None:
            return self._scaled(pictures, masks, size, epoch, samples)
        boxes = self._boxes(pictures, epoch, samples)
        images = self._cropped(pictures, boxes, size)
        # float32 is exact for whole numbers up to 2 ** 24.
        numbers = [np.asarray(mask, "float32")[..., None] for mask in masks]
        labels = np.stack(
            [resize(x, size, box, "nearest") for x, box in zip(numbers, boxes, strict=True)]
        )[..., 0].astype("int32")
        images = with_channels(images, self.channels or images.shape[-1])
        if self.flip:
            mirrored = uniforms(self.seed, "mask-flip", epoch, samples, 1)[:, 0] < 0.5
            images, labels = images.copy(), labels.copy()
            images[mirrored] = images[mirrored][:, :, ::-1]
            labels[mirrored] = labels[mirrored][:, :, ::-1]
        return self._normalise(self._distorted(images, epoch, samples)), labels

    def _distorted(self, images: Any, epoch: int, samples: np.ndarray) -> Any:
        """Returns images, a list or an array, after photometric distortion if it is on."""
        if not self.distort:
            return images
        drawn = uniforms(self.seed, "mask-distort", epoch, samples, 9)
        distorted = list(map(photometric_distortion, images, drawn))
        return distorted if isinstance(images, list) else np.stack(distorted)

    def _scaled(
        self, pictures: Any, masks: Any, size: tuple[int, int], epoch: int, samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns randomly scaled images and masks, cropped to a size and padded at the end."""
        assert self.scale is not None
        low, high = self.scale
        drawn = uniforms(self.seed, "mask-scale", epoch, samples, 2 + 2 * CROPS)
        images, labels = [], np.full((len(samples), *size), NO_LABEL, "int32")
        for row, (picture, mask, own) in enumerate(zip(pictures, masks, drawn, strict=True)):
            side = max(int(min(size) * (low + own[0] * (high - low))), 1)
            whole = with_shorter_side(picture.shape[:2], side)
            image = self.resizing(picture, whole)
            image = with_channels(image[None], self.channels or image.shape[-1])[0]
            numbers = resize(np.asarray(mask, "float32")[..., None], whole, None, "nearest")
            numbers = numbers[..., 0].astype("int32")
            classes = np.unique(np.asarray(mask))
            places = np.searchsorted(classes, numbers)
            part = np.s_[:, :]
            for down, right in own[2:].reshape(CROPS, 2):
                top, left = (
                    int(share * (max(n - side, 0) + 1))
                    for share, n, side in zip((down, right), whole, size, strict=True)
                )
                part = np.s_[top : top + size[0], left : left + size[1]]
                counts = np.bincount(places[part].ravel(), minlength=len(classes))
                counts = counts[classes != NO_LABEL]
                if np.count_nonzero(counts) > 1 and counts.max() < LARGEST_CLASS * counts.sum():
                    break
            image, numbers = image[part], numbers[part]
            if self.flip and own[1] < 0.5:
                image, numbers = image[:, ::-1], numbers[:, ::-1]
            images.append(image)
            labels[row, : numbers.shape[0], : numbers.shape[1]] = numbers
        # The rest has the mean colour, which is 0 after normalisation.
        result = np.zeros((len(images), *size, images[0].shape[-1]), "float32")
        for into, image in zip(result, self._distorted(images, epoch, samples), strict=True):
            into[: image.shape[0], : image.shape[1]] = self._normalise(image)
        return result, labels


@dataclass
class BoxMaker(BatchMaker):
    """Makes batches of images and boxes, which are cropped and flipped like their images."""

    flip: bool = False

    def make(self, epoch: int, number: int) -> tuple[np.ndarray, Any]:
        """Returns float32 images (B, H, W, C), and labels as of `kmodels.data.images.boxes.padded`.

        Labels have as much room in all batches.
        """
        start, stop = self.span(number)
        samples = self.order(epoch)[start:stop]
        pictures, objects = self.source.batch(samples)
        size = self.image_size or pictures[0].shape[:2]
        boxes = self._boxes(pictures, epoch, samples)
        if self.augment is not None:
            for sample, one in zip(samples, objects, strict=True):
                check_objects(one, int(sample))  # which a crop would cut to the image
            shapes = np.array([picture.shape[:2] for picture in pictures])
            shares = np.array(boxes) / shapes[:, [1, 0, 1, 0]]
            objects = [cropped(*one) for one in zip(objects, shares, strict=True)]
        images = self._cropped(pictures, boxes, size)
        images = with_channels(images, self.channels or images.shape[-1])
        labels = padded(objects, self.source.most)  # type: ignore[attr-defined]
        if self.flip:
            mirrored = uniforms(self.seed, "box-flip", epoch, samples, 1)[:, 0] < 0.5
            images = images.copy()
            images[mirrored] = images[mirrored][:, :, ::-1]
            labels[KEYS[0]][mirrored, :, 0] = 1 - labels[KEYS[0]][mirrored, :, 0]
        return self._normalise(images), labels
