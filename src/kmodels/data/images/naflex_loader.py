"""NaFlexLoader: rows of patches for `fit`, from images of any aspect ratio."""

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import check_whole
from kmodels.data.images.augment import Augment
from kmodels.data.images.loader import ImageLoader
from kmodels.data.images.naflex import RowMaker
from kmodels.data.images.resizing import USUAL, Resizing
from kmodels.data.images.sources import ImageSource
from kmodels.data.workers.pool import WorkerPool


class NaFlexLoader(ImageLoader):
    """Batches of images of any aspect ratio, several of them in each row of patches.

    Each batch has the same number of images, rows and patches, so that one compiled step serves
    all; what is left of a row is padding. Where the images of a batch are too large for its rows,
    all of them get fewer patches. Order, crops and sizes follow (seed, epoch), and states, epochs
    and workers are those of `ImageLoader`.

    Args:
        source: images of any sizes, such as a split of `open_dataset`.
        batch_size: images per batch.
        patch_size: side of the square patches, in pixels.
        row_length: patches of a row.
        max_num_patches: patches of an image at most; those of a row by default.
        min_num_patches: in training, the patches that an image may have are drawn from this many
            to `max_num_patches`, as sizes are in NaViT; by default none are drawn.
        rows: rows of a batch; by default as many as hold usual images of the source, of which some
            are read for it.
        images_per_row: images in a row at most; by default four times the mean.
        enlarge: makes small images larger, so that all come close to `max_num_patches`; False keeps
            their size, which is what saves work.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        augment: for training images. The aspect ratio of a `random_resized_crop` is near that of
            its image, and the crop is not squeezed. `mixup` and `cutmix` mix the part that two
            images have in their middle.
        workers: as of `ImageLoader`, like all that follow.
        drop_last: see there.
        resizing: see there.
        channels: see there; 3 by default.
        mean: see there; of SigLIP by default.
        std: see there; of SigLIP by default.
        one_hot: see there.

    A batch is {"pixel_values": float32 (rows, row_length, patch * patch * C), "spatial_shapes":
    int32 (rows, images_per_row, 2)}, int32 labels (rows, images_per_row) and float32 weights of the
    same shape, 0 where there is no image; the mean over all places is that over the images.

    Raises:
        InputError: for settings that do not fit.

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
        # What `ImageLoader` makes is of images of one size.
        keras.utils.PyDataset.__init__(self, workers=1, use_multiprocessing=False)
        check_whole("workers", workers, 0)
        for name, value in (("rows", rows), ("images_per_row", images_per_row)):
            if value is not None:
                check_whole(name, value)
        if augment is not None and augment.mixes:
            one_hot = augment.num_classes
        most = row_length if max_num_patches is None else max_num_patches
        self.maker: Any = RowMaker(
            source,
            batch_size,
            shuffle,
            seed,
            augment,
            drop_last,
            patch_size,
            row_length,
            most,
            most if min_num_patches is None else min_num_patches,
            rows or 0,
            images_per_row or 0,
            enlarge,
            channels,
            tuple(np.atleast_1d(np.asarray(mean, "float64")).tolist()),
            tuple(np.atleast_1d(np.asarray(std, "float64")).tolist()),
            resizing,
            one_hot,
        )
        self.epoch = self.skip = self.handed_out = 0
        self.worker_count = workers
        self._pool: WorkerPool | None = None
        self._ahead: dict[tuple[int, int], Future] = {}

    @property
    def samples(self) -> int:
        """Images in an epoch."""
        maker = self.maker
        return maker.batches * maker.batch_size if maker.drop_last else len(maker.source)

    @property
    def batch_size(self) -> int:
        """Rows per batch."""
        return self.maker.rows

    def part(self, start: int, stop: int) -> "NaFlexLoader":
        """Returns the same batches with these rows alone, see `rows_within`."""
        part = copy.copy(self)
        part.maker, part._pool, part._ahead = replace(self.maker, part=(start, stop)), None, {}
        return part
