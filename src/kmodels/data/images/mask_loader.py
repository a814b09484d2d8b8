"""MaskLoader: batches of images and masks for `fit`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.images.augment import Augment
from kmodels.data.images.batches import BatchMaker
from kmodels.data.images.loader import ImageLoader
from kmodels.data.images.pictures import with_channels
from kmodels.data.images.resizing import USUAL, Resizing, resize
from kmodels.data.images.sources import ImageSource
from kmodels.data.rng import uniforms


@dataclass
class MaskBatchMaker(BatchMaker):
    """`BatchMaker` whose labels are masks, which are cut and mirrored as their images are."""

    flip: bool = False

    def pictures(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns images decoded, cropped, resized, mirrored and normalised, and their masks."""
        pictures, masks = self.source.batch(samples)
        size = self.image_size or pictures[0].shape[:2]
        boxes: Sequence[tuple | None] = [None] * len(samples)
        if self.augment is not None:
            shapes = np.array([picture.shape[:2] for picture in pictures])
            drawn = self.augment.boxes(shapes, self.seed, epoch, samples)
            boxes = [tuple(box) for box in drawn.tolist()]
        images = np.stack(
            [self.resizing(x, size, box) for x, box in zip(pictures, boxes, strict=True)]
        )
        # Whole numbers up to 2 ** 24 are themselves in float32.
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
        return self._normalise(images), labels


class MaskLoader(ImageLoader):
    """`ImageLoader` of images with masks; order and augmentation follow (seed, epoch) as there.

    Args:
        source: images with masks, such as a part of `open_masks`.
        batch_size: images per batch.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        flip: mirrors images and masks at random.
        crop: takes at least this share of the area, at random; None takes all.
        workers: processes that make batches, as in `ImageLoader`.
        drop_last: leaves out a last batch that is not full.
        image_size: (height, width) to resize to; that of the first image by default. Masks take
            the nearest pixel.
        resizing: how images are; it must not crop.
        channels: 1 or 3; the images' own by default.
        mean: mean of pixels / 255, one or one per channel.
        std: std of pixels / 255, one or one per channel.

    A batch is float32 images (B, H, W, C) and int32 masks (B, H, W).

    Raises:
        InputError: for settings that do not fit.
    """

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        flip: bool = False,
        crop: float | None = None,
        workers: int = 0,
        drop_last: bool = False,
        image_size: tuple[int, int] | None = None,
        resizing: Resizing = USUAL,
        channels: int | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ):
        if resizing.crops:
            raise InputError(
                'resizing has crop_to_aspect_ratio=True, resize_size or resize_mode="crop", which '
                "leave pixels without a class; give one without them"
            )
        super().__init__(
            source,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            augment=None if crop is None else Augment(random_resized_crop=(crop, 1.0)),
            workers=workers,
            drop_last=drop_last,
            image_size=image_size,
            resizing=resizing,
            channels=channels,
            mean=mean,
            std=std,
        )
        held = {field.name: getattr(self.maker, field.name) for field in fields(BatchMaker)}
        self.maker = MaskBatchMaker(**held, flip=flip)
