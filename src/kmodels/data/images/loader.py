"""Loaders of images for `fit`, whose batches are made here or by worker processes."""

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.runtime import check_channels_last
from kmodels.data.images.augment import Augment
from kmodels.data.images.batches import BatchMaker, BoxMaker, MaskMaker, ViewMaker
from kmodels.data.images.naflex import RowMaker
from kmodels.data.images.resizing import USUAL, Resizing, sides_of
from kmodels.data.images.sources import ImageSource
from kmodels.data.pipeline.indexed import ResumableBatches
from kmodels.data.workers import WorkerPool


class ImageLoader(ResumableBatches):
    """Batches of images, equal on every backend and with any number of workers.

    The order of samples and all augmentation depend on seed and epoch alone. `Task.fit` sets the
    epoch; in another `fit` the loader advances after each epoch that was returned in full, or call
    `set_epoch`. Such a `fit` must not shuffle batches as well: pass `shuffle=False`.

    Args:
        source: images, such as a split of `open_dataset`.
        batch_size: images per batch.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        augment: augmentation of training images.
        preprocess: float images from pixels (B, H, W, C) in 0..255, instead of mean and std. With
            workers it must be importable: a function of a module, not of a script.
        workers: processes that make batches; 0 makes them in this one. They import only NumPy and
            Pillow, and are started, not forked, so they are safe with JAX.
        drop_last: drops a last batch that is not full.
        image_size: (height, width) to resize to; default: the size of the images.
        resizing: how images are resized; `model.preprocessor.resizing` is the method that the
            checkpoint was trained with.
        channels: 1 or 3; default: the channels of the images.
        mean: mean of pixels / 255, one or one per channel.
        std: std of pixels / 255, one or one per channel.
        one_hot: number of classes for labels as float32 (B, classes); set by augment if it mixes.
        repeats: repeated augmentation (Hoffer et al. 2019): an epoch has this number of copies of
            1 / repeats of the images; needs shuffle.

    A batch is float32 images (B, H, W, C) and int32 labels (B,).

    Raises:
        InputError: for settings that do not fit together, or if Keras' `image_data_format` is
            "channels_first".
    """

    derived = ("worker_count",)

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        augment: Augment | None = None,
        preprocess: Callable[[np.ndarray], np.ndarray] | None = None,
        workers: int = 0,
        drop_last: bool = False,
        image_size: tuple[int, int] | None = None,
        resizing: Resizing = USUAL,
        channels: int | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        one_hot: int | None = None,
        repeats: int = 1,
    ):
        # Keras' own workers fork; ours do the work, and Keras sees a plain sequence of batches.
        super().__init__(workers=1, use_multiprocessing=False)
        check_channels_last()
        check_whole("workers", workers, 0)
        if not isinstance(augment, Augment | None):
            raise InputError(f"augment is {augment!r}; give an Augment, or None")
        if not isinstance(resizing, Resizing):
            raise InputError(f"resizing is {resizing!r}; give a Resizing")
        if augment is not None and augment.mixes:
            if one_hot not in (None, augment.num_classes):
                raise InputError(
                    f"one_hot is {one_hot} and num_classes of augment {augment.num_classes}; leave "
                    "one_hot out"
                )
            one_hot = augment.num_classes
        self.worker_count = workers
        self.maker: Any = BatchMaker(
            source,
            batch_size,
            shuffle,
            seed,
            augment,
            preprocess,
            drop_last,
            None if image_size is None else sides_of(image_size),
            channels,
            tuple(np.atleast_1d(np.asarray(mean, "float64")).tolist()),
            tuple(np.atleast_1d(np.asarray(std, "float64")).tolist()),
            one_hot,
            resizing,
            repeats,
        )
        if repeats > 1 and not shuffle:
            raise InputError(f"repeats is {repeats} without shuffle; set shuffle=True")
        self._pool: WorkerPool | None = None
        self._ahead: dict[tuple[int, int], Future] = {}

    def _make_by(self, kind: type[BatchMaker], **more: Any) -> None:
        """Replaces the maker by one of a subclass with further arguments."""
        settings = {field.name: getattr(self.maker, field.name) for field in fields(BatchMaker)}
        self.maker = kind(**settings, **more)

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self.maker.batches

    @property
    def samples(self) -> int:
        """Number of images in an epoch."""
        maker = self.maker
        return maker.batches * maker.batch_size if maker.drop_last else len(maker.source)

    @property
    def batch_size(self) -> int:
        """Number of images per batch."""
        return self.maker.batch_size

    def part(self, start: int, stop: int) -> Self:
        """Returns a loader of rows start to stop of the same batches, see `rows_within`."""
        part = copy.copy(self)
        part.maker, part._pool, part._ahead = replace(self.maker, part=(start, stop)), None, {}
        return part

    def __getitem__(self, index: int) -> tuple:
        number = self.number_of(index)
        make = self._from_workers if self.worker_count else self.maker.make
        batch = make(self.epoch, number)
        self.handed_out = max(self.handed_out, index + 1)
        return batch

    def _from_workers(self, epoch: int, number: int) -> tuple:
        if self._pool is None:
            self._pool = WorkerPool(self.maker, self.worker_count)
        if (epoch, number) not in self._ahead:
            # Another epoch, or batches out of order: those that were requested are not needed.
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        # Two for each worker: one in progress, one ready.
        for later in range(number, min(number + 2 * self.worker_count, self.maker.batches)):
            if (epoch, later) not in self._ahead:
                self._ahead[epoch, later] = self._pool.submit(epoch, later)
        return self._ahead.pop((epoch, number)).result()

    def close(self) -> None:
        """Stops the workers; they start again when a batch is requested."""
        pool, self._pool = self._pool, None
        self._ahead.clear()
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_ahead": {}}


class ViewLoader(ImageLoader):
    """Batches of images in several views each, for `fit`.

    Args:
        source: images, such as a split of `open_dataset`.
        batch_size: images per batch.
        views: the augmentation of each view, without mixing.
        **settings: other arguments of `ImageLoader`, except for augment.

    A batch is float32 images (B, V, H, W, C) and int32 labels (B,).

    Raises:
        InputError: without views, for views that mix images, or for augment.
    """

    def __init__(
        self, source: ImageSource, batch_size: int, views: Sequence[Augment], **settings: Any
    ):
        super().__init__(source, batch_size, **settings)
        if settings.get("augment") is not None:
            raise InputError("augment is set beside views; give each view its own Augment")
        if not views or not all(isinstance(one, Augment) and not one.mixes for one in views):
            raise InputError("views are none, or mix images; give an Augment without mixing each")
        self._make_by(ViewMaker, views=tuple(views))


class MaskLoader(ImageLoader):
    """Batches of images and masks, such as for semantic segmentation.

    Args:
        source: images with masks, such as a part of `open_masks`.
        batch_size: images per batch.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        flip: flips images and masks left to right with probability 1/2.
        crop: smallest share of the area of a random crop; None takes whole images.
        scale: (smallest, largest) factor from the shorter side of `image_size` to that of an image,
            which is scaled by a random one and then cropped at random, so that no class has more
            than 3/4 of the crop if ten tries find one. The rest has label 255. Instead of crop.
        distort: photometric distortion: brightness, contrast, saturation and hue change at random.
        workers: see `ImageLoader`.
        drop_last: drops a last batch that is not full.
        image_size: (height, width) to resize to; default: the size of the first image. Masks are
            resized by the nearest pixel.
        resizing: how images are resized; it must not crop.
        channels: 1 or 3; default: the channels of the images.
        mean: mean of pixels / 255, one or one per channel.
        std: std of pixels / 255, one or one per channel.

    A batch is float32 images (B, H, W, C) and int32 masks (B, H, W).

    Raises:
        InputError: for settings that do not fit together.
    """

    own_maker: type[BatchMaker] = MaskMaker

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        flip: bool = False,
        crop: float | None = None,
        scale: tuple[float, float] | None = None,
        distort: bool = False,
        workers: int = 0,
        drop_last: bool = False,
        image_size: tuple[int, int] | None = None,
        resizing: Resizing = USUAL,
        channels: int | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ):
        if scale is not None:
            low, high = scale
            if not 0 < low <= high < math.inf:
                raise InputError(f"scale is {scale}; give factors with 0 < smallest <= largest")
            if crop is not None:
                raise InputError("crop and scale are both set; choose one")
        if crop is not None:
            check_number("crop", crop, above=0, most=1)
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
        more = {"scale": scale, "distort": distort} if scale or distort else {}
        if more and self.own_maker is not MaskMaker:
            raise InputError(f"{type(self).__name__} has no scale and distort; leave them out")
        self._make_by(self.own_maker, flip=flip, **more)


class BoxLoader(MaskLoader):
    """Batches of images and boxes of objects; arguments are those of `MaskLoader`.

    A batch is float32 images (B, H, W, C) and {"boxes": float32 (B, S, 4), "class_labels": int32
    (B, S)}: center x and y, width and height as parts of the sides of the image, and -1 for no box.
    A crop cuts boxes off at its border, and a flip mirrors them.

    Args:
        source: images with boxes, such as a part of `open_boxes`.
        batch_size: images per batch.
        **settings: of `MaskLoader`.

    Raises:
        InputError: for settings that do not fit together.
    """

    own_maker = BoxMaker

    def __init__(self, source: ImageSource, batch_size: int, **settings: Any):
        super().__init__(source, batch_size, **settings)


class NaFlexLoader(ImageLoader):
    """Batches of images of any aspect ratio, several of them in each row of patches.

    All batches have the same number of images, rows and patches, so that one compiled step serves
    them; the end of a row is padding. If the images of a batch are too large for its rows, all of
    them get fewer patches. Order, crops and sizes depend on seed and epoch alone.

    Args:
        source: images of any sizes, such as a split of `open_dataset`.
        batch_size: images per batch.
        patch_size: side of the square patches, in pixels.
        row_length: patches of a row.
        max_num_patches: largest number of patches of an image; default: those of a row.
        min_num_patches: smallest number of patches in training; the number of each image is drawn
            from this to `max_num_patches`, like sizes in NaViT. Default: nothing is drawn.
        rows: rows of a batch; default: enough for most batches, estimated from some images.
        images_per_row: largest number of images in a row; default: four times the mean.
        enlarge: enlarges small images, so that all come close to `max_num_patches`; False keeps
            their size, which saves work.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        augment: augmentation of training images. The aspect ratio of a `random_resized_crop` is
            near that of its image, and the crop is not distorted. `mixup` and `cutmix` mix the
            common middle part of two images.
        workers: see `ImageLoader`, as for all arguments below.
        drop_last: drops a last batch that is not full.
        resizing: how images are resized.
        channels: 1 or 3.
        mean: mean of pixels / 255; default: that of SigLIP.
        std: std of pixels / 255; default: that of SigLIP.
        one_hot: number of classes for labels as float32.

    A batch is {"pixel_values": float32 (rows, row_length, patch * patch * C), "spatial_shapes":
    int32 (rows, images_per_row, 2)}, int32 labels (rows, images_per_row) and float32 weights of the
    same shape, 0 for places without an image; the mean over all places is that over the images.

    Raises:
        InputError: for settings that do not fit together.

    Source:
        Dehghani et al. 2023, arXiv:2307.06304; timm's `naflex_loader`.
    """

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        patch_size: int = 16,
        row_length: int = 256,
        max_num_patches: int | None = None,
        min_num_patches: int | None = None,
        rows: int | None = None,
        images_per_row: int | None = None,
        enlarge: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        augment: Augment | None = None,
        workers: int = 0,
        drop_last: bool = False,
        resizing: Resizing = USUAL,
        channels: int = 3,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        one_hot: int | None = None,
    ):
        for name, value in (("rows", rows), ("images_per_row", images_per_row)):
            if value is not None:
                check_whole(name, value)
        super().__init__(
            source,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            augment=augment,
            workers=workers,
            drop_last=drop_last,
            resizing=resizing,
            channels=channels,
            mean=mean,
            std=std,
            one_hot=one_hot,
        )
        most = row_length if max_num_patches is None else max_num_patches
        self._make_by(
            RowMaker,
            patch_size=patch_size,
            row_length=row_length,
            max_num_patches=most,
            min_num_patches=most if min_num_patches is None else min_num_patches,
            rows=rows or 0,
            images_per_row=images_per_row or 0,
            enlarge=enlarge,
        )

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self.maker.rows
