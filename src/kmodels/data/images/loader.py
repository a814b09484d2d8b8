"""ImageLoader: batches for `fit`, with workers in processes of their own."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.augment import Augment
from kmodels.data.images.batches import BatchMaker
from kmodels.data.images.image_format import check_channels_last
from kmodels.data.images.resizing import USUAL, Resizing
from kmodels.data.images.sources import ImageSource
from kmodels.data.workers.pool import WorkerPool


class ImageLoader(keras.utils.PyDataset):
    """Batches of images, equal on every backend and with any number of workers.

    The order of samples and all augmentation follow (seed, epoch). `Task.fit` tells the loader the
    epoch; with another `fit` the loader counts the epochs it has handed out in full, or call
    `set_epoch`. `fit` must not shuffle batches on top: give it `shuffle=False` (Task's does so).

    Args:
        source: images, such as a split of `open_dataset`.
        batch_size: images per batch.
        shuffle: a new order in each epoch.
        seed: seed of order and augmentation.
        augment: for training images.
        preprocess: float images from pixels (B, H, W, C) in 0..255, instead of mean and std. With
            workers it must be importable: a function of a module, not of a script.
        workers: processes that make batches; 0 makes them in this one. They import NumPy and
            Pillow alone and are started fresh, never forked, so they are safe beside JAX.
        drop_last: leaves out a last batch that is not full.
        image_size: (height, width) to resize to; the images' own by default.
        resizing: how; `model.preprocessor.resizing` is what the checkpoint was trained with.
        channels: 1 or 3; the images' own by default.
        mean: mean of pixels / 255, one or one per channel.
        std: std of pixels / 255, one or one per channel.
        one_hot: number of classes for labels as float32 (B, classes), which mixing always gives.

    A batch is float32 images (B, H, W, C) and int32 labels (B,).

    Raises:
        InputError: for settings that do not fit, or where Keras' `image_data_format` is
            "channels_first".
    """

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
    ):
        # Keras' own workers fork; ours do the work, and Keras sees a plain sequence of batches.
        super().__init__(workers=1, use_multiprocessing=False)
        check_channels_last()
        check_whole("workers", workers, 0)
        if augment is not None and augment.mixes:
            one_hot = augment.num_classes
        self.maker = BatchMaker(
            source,
            batch_size,
            shuffle,
            seed,
            augment,
            preprocess,
            drop_last,
            None if image_size is None else (int(image_size[0]), int(image_size[1])),
            channels,
            tuple(np.atleast_1d(np.asarray(mean, "float64")).tolist()),
            tuple(np.atleast_1d(np.asarray(std, "float64")).tolist()),
            one_hot,
            resizing,
        )
        self.epoch = 0
        self.skip = 0
        self.handed_out = 0
        self.worker_count = workers
        self._pool: WorkerPool | None = None
        self._ahead: dict[tuple[int, int], Future] = {}

    @property
    def samples(self) -> int:
        """Images in an epoch."""
        count = len(self.maker.source)
        return self.maker.batches * self.batch_size if self.maker.drop_last else count

    @property
    def batch_size(self) -> int:
        """Images per batch."""
        return self.maker.batch_size

    def part(self, start: int, stop: int) -> "ImageLoader":
        """Returns the same batches with these rows alone, see `rows_within`."""
        part = copy.copy(self)
        part.maker, part._pool, part._ahead = replace(self.maker, rows=(start, stop)), None, {}
        return part

    @property
    def num_batches(self) -> int:
        """Batches left in this epoch."""
        return len(self)

    def __len__(self) -> int:
        return self.maker.batches - self.skip

    def set_epoch(self, epoch: int, skip: int | None = None) -> None:
        """Tells which epoch comes next; order and augmentation follow it.

        Args:
            epoch: from 0.
            skip: batches to leave out at its start, for resuming in the middle: the loader is so
                much shorter until another epoch is set. By default 0, or as before where the epoch
                stays the same.
        """
        if skip is None:
            skip = self.skip if epoch == self.epoch else 0
        if not 0 <= skip < self.maker.batches:
            raise InputError(f"skip is {skip}; give 0 to {self.maker.batches - 1} batches")
        self.epoch, self.skip, self.handed_out = epoch, skip, 0

    def state_dict(self) -> dict[str, int]:
        """Returns how many batches of which epoch were handed out."""
        return {"epoch": self.epoch, "batch": self.skip + self.handed_out}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on after the batch of a state; see `kmodels.data.StatefulLoader`."""
        epoch, batch = state_dict["epoch"], state_dict["batch"]
        over = batch >= self.maker.batches
        self.set_epoch(epoch + over, 0 if over else batch)

    def on_epoch_end(self) -> None:
        """Goes to the next epoch where all of this one was handed out.

        Keras also calls this before training starts, when nothing or one batch was.
        """
        if self.handed_out >= len(self):
            self.set_epoch(self.epoch + 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, number = self.epoch, index + self.skip
        batch = self._from_workers(epoch, number) if self.worker_count else None
        self.handed_out = max(self.handed_out, index + 1)
        return batch or self.maker.make(epoch, number)

    def _from_workers(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._pool is None:
            self._pool = WorkerPool(self.maker, self.worker_count)
        if (epoch, number) not in self._ahead:
            # A jump: another epoch, or batches out of order. Batches that were made ahead are of no
            # use.
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        # Two for each worker: one in the making, one ready.
        for later in range(number, min(number + 2 * self.worker_count, self.maker.batches)):
            if (epoch, later) not in self._ahead:
                self._ahead[epoch, later] = self._pool.submit(epoch, later)
        return self._ahead.pop((epoch, number)).result()

    def close(self) -> None:
        """Ends the workers; they start again when a batch is asked for."""
        pool, self._pool = self._pool, None
        self._ahead.clear()
        if pool is not None:
            pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_ahead": {}}
