"""One batch of rows from its number: a pure function of source, settings, epoch and number.

Workers run this, so it imports no framework.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.augment import CROP_NUMBERS, Augment, crop_boxes
from kmodels.data.images.naflex.mixing import mix
from kmodels.data.images.naflex.patches import grid_of, patches_of
from kmodels.data.images.pictures import with_channels
from kmodels.data.images.resizing import Resizing
from kmodels.data.images.sources import ImageSource, check_labels
from kmodels.data.packing import assign
from kmodels.data.rng import order, uniforms
from kmodels.data.rows import rows_within

Grid = tuple[int, int]
# Images that stand for all where the number of rows is to be found.
LOOKED_AT, TRIED = 256, 16
# What is left of each image's patches, step by step, where a batch does not fit into its rows.
LESS = 0.95


@dataclass
class RowMaker:
    """Everything that decides what is in a batch. Picklable. See `loader.NaFlexLoader`."""

    source: ImageSource
    batch_size: int
    shuffle: bool
    seed: int
    augment: Augment | None
    drop_last: bool
    patch_size: int
    row_length: int
    max_num_patches: int
    min_num_patches: int
    rows: int
    images_per_row: int
    enlarge: bool
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resizing: Resizing
    one_hot: int | None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not len(self.source):
            raise InputError("the data is empty; give at least one image")
        for name in ("batch_size", "patch_size", "row_length", "max_num_patches", "channels"):
            check_whole(name, getattr(self, name))
        if not 1 <= self.min_num_patches <= self.max_num_patches <= self.row_length:
            raise InputError(
                f"min_num_patches is {self.min_num_patches}, max_num_patches "
                f"{self.max_num_patches} and row_length {self.row_length}; give 1 <= "
                "min_num_patches <= max_num_patches <= row_length"
            )
        if self.drop_last and len(self.source) < self.batch_size:
            raise InputError(
                f"drop_last leaves nothing of {len(self.source)} images in batches of "
                f"{self.batch_size}; give a smaller batch_size"
            )
        if self.one_hot:
            check_labels(np.asarray(self.source.labels), self.one_hot, "data")
        if not self.rows:
            self.rows = self._rows_needed()
        if not self.images_per_row:
            self.images_per_row = min(self.batch_size, 4 * -(-self.batch_size // self.rows))
        if self.rows * self.images_per_row < self.batch_size:
            raise InputError(
                f"{self.rows} rows of {self.images_per_row} images hold no batch of "
                f"{self.batch_size}; give more rows, or a larger images_per_row"
            )

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        count = len(self.source)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def _rows_needed(self) -> int:
        """Returns as many rows as hold most batches of usual images."""
        chosen = np.unique(np.linspace(0, len(self.source) - 1, LOOKED_AT).astype(int))
        budgets = self._budgets(0, chosen)
        counts = []
        for at in range(0, len(chosen), 32):
            pictures = self.source.batch(chosen[at : at + 32])[0]
            for picture, budget in zip(pictures, budgets[at : at + 32], strict=True):
                rows, columns = self._grid(picture.shape[:2], int(budget))
                counts.append(rows * columns)
        # Packed as batches are: what is left of a row may be too small for any other image, so a
        # sum of patches says too little. The largest batches get fewer patches instead.
        drawn = uniforms(self.seed, "naflex-rows", 0, np.arange(TRIED), self.batch_size)
        picked = (drawn * len(counts)).astype(int)
        needed = [len(assign([counts[i] for i in row], self.row_length)) for row in picked]
        return sorted(needed)[TRIED * 3 // 4]

    def _budgets(self, epoch: int, samples: np.ndarray) -> np.ndarray:
        """Returns the patches that each image may have, before it is known whether all fit."""
        if self.min_num_patches == self.max_num_patches:
            return np.full(len(samples), self.max_num_patches)
        drawn = uniforms(self.seed, "naflex-length", epoch, samples, 1)[:, 0]
        span = self.max_num_patches - self.min_num_patches + 1
        return self.min_num_patches + (drawn * span).astype(int)

    def _grid(self, shape: tuple[int, ...], budget: int) -> Grid:
        return grid_of(shape[0], shape[1], self.patch_size, budget, self.enlarge)

    def make(self, epoch: int, number: int) -> tuple[dict[str, np.ndarray], Any, np.ndarray]:
        """Returns one batch: patches and grids, labels, and weights.

        Args:
            epoch: from 0.
            number: from 0 within the epoch.
        """
        count = len(self.source)
        samples = order(count, self.seed, epoch) if self.shuffle else np.arange(count)
        samples = samples[number * self.batch_size : (number + 1) * self.batch_size]
        pictures, labels = self.source.batch(samples)
        boxes = self._boxes([x.shape[:2] for x in pictures], epoch, samples)
        grids, members = self._fitted(boxes, epoch, samples)
        images = [
            self._image(picture, box, grid, epoch, sample)
            for picture, box, grid, sample in zip(pictures, boxes, grids, samples, strict=True)
        ]
        if self.one_hot:
            labels = (labels[:, None] == np.arange(self.one_hot)).astype("float32")
        if self.augment is not None and self.augment.mixes:
            images, labels = mix(images, labels, self.augment, self.seed, epoch, samples)
        batch = self._packed(images, grids, labels, members)
        if self.part is None:
            return batch
        within = rows_within(*self.part, self.rows)
        x, y, weights = batch
        return {name: value[within] for name, value in x.items()}, y[within], weights[within]

    def _boxes(self, shapes: list[tuple[int, ...]], epoch: int, samples: np.ndarray) -> np.ndarray:
        """Returns what is cropped: (B, 4), left, top, right, bottom.

        The aspect ratio of a crop is near that of its image: nothing is squeezed into a square.
        """
        heights, widths = np.asarray(shapes, "float64").T
        whole = np.stack([0 * widths, 0 * heights, widths, heights], axis=1)
        if self.augment is None or self.augment.random_resized_crop is None:
            return whole
        drawn = uniforms(self.seed, "naflex-crop", epoch, samples, CROP_NUMBERS)
        sizes = np.array(shapes)
        return crop_boxes(drawn, sizes, self.augment.random_resized_crop, widths / heights)

    def _fitted(
        self, boxes: np.ndarray, epoch: int, samples: np.ndarray
    ) -> tuple[list[Grid], list[list[int]]]:
        """Returns the grid of each image, and the images of each row.

        Where a batch of large images does not fit, all of them get fewer patches.
        """
        sides = np.maximum(np.rint(boxes[:, 2:] - boxes[:, :2]), 1).astype(int)
        most = self._budgets(epoch, samples)
        while True:
            grids = [
                self._grid((height, width), int(budget))
                for (width, height), budget in zip(sides.tolist(), most, strict=True)
            ]
            counts = [rows * columns for rows, columns in grids]
            members = assign(counts, self.row_length, self.images_per_row)
            if len(members) <= self.rows:
                return grids, members
            if max(counts) == 1:
                raise InputError(
                    f"{len(samples)} images do not fit into {self.rows} rows of {self.row_length} "
                    f"patches and {self.images_per_row} images; give more rows"
                )
            most = np.maximum((np.minimum(most, counts) * LESS).astype(int), 1)

    def _image(
        self, picture: np.ndarray, box: np.ndarray, grid: Grid, epoch: int, sample: int
    ) -> np.ndarray:
        """Returns an image cropped, resized, augmented and normalised."""
        size = (grid[0] * self.patch_size, grid[1] * self.patch_size)
        is_whole = tuple(box) == (0, 0, picture.shape[1], picture.shape[0])
        image = self.resizing(picture, size, None if is_whole else tuple(box.tolist()))
        image = with_channels(image, self.channels)
        key = np.array([sample])
        if self.augment is not None:
            image = self.augment.pixels(image[None], self.seed, epoch, key, self.mean)[0]
        mean, std = np.array(self.mean, "float32"), np.array(self.std, "float32")
        image = (image.astype("float32") * np.float32(1 / 255) - mean) / std
        if self.augment is not None:
            self.augment.erase(image[None], self.seed, epoch, key)
        return image

    def _packed(
        self,
        images: list[np.ndarray],
        grids: list[Grid],
        labels: np.ndarray,
        members: list[list[int]],
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns the arrays of a batch."""
        width = self.patch_size**2 * self.channels
        values = np.zeros((self.rows, self.row_length, width), "float32")
        shapes = np.zeros((self.rows, self.images_per_row, 2), "int32")
        targets = np.zeros((self.rows, self.images_per_row, *labels.shape[1:]), labels.dtype)
        weights = np.zeros((self.rows, self.images_per_row), "float32")
        for row, numbers in enumerate(members):
            at = 0
            for slot, number in enumerate(numbers):
                patches = patches_of(images[number], self.patch_size)
                values[row, at : at + len(patches)] = patches
                shapes[row, slot], targets[row, slot] = grids[number], labels[number]
                at += len(patches)
                weights[row, slot] = 1.0
        # Keras takes the mean over all places: with these weights it is that over the images.
        weights *= np.float32(weights.size / len(images))
        return {"pixel_values": values, "spatial_shapes": shapes}, targets, weights
