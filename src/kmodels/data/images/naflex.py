"""Images of any aspect ratio as rows of patches (NaFlex), in NumPy.

Batches are pure functions of source, settings, epoch and number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.data.images.augment import CROP_NUMBERS, Augment, crop_boxes
from kmodels.data.images.batches import BatchMaker
from kmodels.data.images.decoding import with_channels
from kmodels.data.rng import symmetric_beta, uniforms
from kmodels.data.rows import assign, rows_within

# The search for the scale in transformers' processor: its precision, and its range.
CLOSE, LOWEST, HIGHEST = 1e-5, 1e-6, 100.0


def grid_of(
    height: int, width: int, patch_size: int, max_num_patches: int, enlarge: bool = True
) -> tuple[int, int]:
    """Returns the numbers of rows and columns of patches of an image of a size in pixels.

    With `enlarge`, small images are enlarged, so that all come close to `max_num_patches`.
    """
    for name, value in (("height", height), ("width", width), ("patch_size", patch_size)):
        check_whole(name, value)
    check_whole("max_num_patches", max_num_patches)

    def scaled(scale: float) -> tuple[int, int]:
        # As in transformers, the number is rounded up, which distorts the image slightly.
        rows, columns = (max(math.ceil(side * scale / patch_size), 1) for side in (height, width))
        return rows, columns

    if not enlarge and math.prod(scaled(1.0)) <= max_num_patches:
        return scaled(1.0)
    low, high = LOWEST, HIGHEST
    while high - low >= CLOSE:
        middle = (low + high) / 2
        if math.prod(scaled(middle)) <= max_num_patches:
            low = middle
        else:
            high = middle
    rows, columns = scaled(low)
    # An extremely long image has at least one patch across, so too many along.
    return min(rows, max_num_patches), min(columns, max_num_patches)


def normalized(image: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns pixels in [0, 255] divided by 255 and normalised like transformers, float32."""
    pixels = (image.astype("float64") * (1 / 255)).astype("float32")
    return (pixels - np.asarray(mean, "float32")) / np.asarray(std, "float32")


def patches_of(image: np.ndarray, patch_size: int) -> np.ndarray:
    """Returns the patches of an image, row by row: (H, W, C) -> (P, patch * patch * C).

    The values of a patch are in the order (row, column, channel).
    """
    rows, columns = (side // patch_size for side in image.shape[:2])
    x = image.reshape(rows, patch_size, columns, patch_size, image.shape[-1])
    return x.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def padded(
    images: Sequence[np.ndarray], grids: Sequence[tuple[int, int]], length: int
) -> dict[str, np.ndarray]:
    """Returns one row of patches (P, patch * patch * C) for each image, padded with zeros.

    Returns "pixel_values" (B, length, patch * patch * C) float32, "pixel_attention_mask" (B,
    length) int32, 1 for patches, and "spatial_shapes" (B, 2) int32.
    """
    if not images:
        raise InputError("there are no images; give at least one")
    values = np.zeros((len(images), length, images[0].shape[-1]), "float32")
    mask = np.zeros((len(images), length), "int32")
    for row, patches in enumerate(images):
        values[row, : len(patches)] = patches
        mask[row, : len(patches)] = 1
    return {
        "pixel_values": values,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.asarray(grids, "int32").reshape(-1, 2),
    }


def pairs_of(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns pairs of images with similar aspect ratios; an odd last one has no partner."""
    ratios = [width / height for height, width in shapes]
    order = np.argsort(ratios, kind="stable").tolist()
    return list(zip(order[::2], order[1::2], strict=False))


def mix(
    images: list[np.ndarray],
    labels: np.ndarray,
    augment: Augment,
    seed: int,
    epoch: int,
    samples: np.ndarray,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Mixes pairs of images, float32 (H, W, C) each, and their labels, float32 (B, classes).

    Each keeps its own size. The random numbers of a pair depend on the number of its first sample.

    Source:
        timm 1.0, `timm.data.naflex_mixup.mix_batch_variable_size`.
    """
    mixed, targets = list(images), labels.copy()
    pairs = pairs_of([image.shape[:2] for image in images])
    drawn = uniforms(seed, "naflex-mix", epoch, samples[[one for one, _ in pairs]], 4)
    for (one, other), (kind, share, down, right) in zip(pairs, drawn, strict=True):
        both = augment.mixup > 0 and augment.cutmix > 0
        blends = kind < 0.5 if both else augment.mixup > 0
        alpha = augment.mixup if blends else augment.cutmix
        weight = float(symmetric_beta(np.array([share]), alpha)[0])
        for here, there in ((one, other), (other, one)):
            mixed[here], own = _mixed(images[here], images[there], weight, blends, down, right)
            targets[here] = labels[here] * own + labels[there] * (1 - own)
    return mixed, targets


def _mixed(
    image: np.ndarray, other: np.ndarray, weight: float, blends: bool, down: float, right: float
) -> tuple[np.ndarray, float]:
    """Returns the mix of two images, and the weight of the first one's label."""
    sizes = np.array([image.shape[:2], other.shape[:2]])
    overlap = sizes.min(axis=0)
    starts = (sizes - overlap) // 2
    part = overlap if blends else (overlap * np.sqrt(1 - weight)).astype(int)
    if not blends:
        starts = starts + (np.array([down, right]) * (overlap - part + 1)).astype(int)
    into, origin = (
        np.s_[top : top + part[0], left : left + part[1]] for top, left in starts.tolist()
    )
    result, share = image.copy(), float(np.prod(part) / np.prod(sizes[0]))
    if not blends:
        result[into] = other[origin]
        return result, 1 - share
    result[into] = image[into] * np.float32(weight) + other[origin] * np.float32(1 - weight)
    return result, 1 - share + weight * share


Grid = tuple[int, int]
# Images and batches by which the number of rows is estimated.
LOOKED_AT, TRIED = 256, 16
# Factor by which the patches of each image are reduced until a batch fits into its rows.
LESS = 0.95


@dataclass(kw_only=True)
class RowMaker(BatchMaker):
    """Makes the batches of a `NaFlexLoader`, whose arguments these are; it can be pickled."""

    patch_size: int
    row_length: int
    max_num_patches: int
    min_num_patches: int
    rows: int
    images_per_row: int
    enlarge: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patch_size", "row_length", "max_num_patches", "channels"):
            check_whole(name, getattr(self, name))
        if not 1 <= self.min_num_patches <= self.max_num_patches <= self.row_length:
            raise InputError(
                f"min_num_patches is {self.min_num_patches}, max_num_patches "
                f"{self.max_num_patches} and row_length {self.row_length}; give 1 <= "
                "min_num_patches <= max_num_patches <= row_length"
            )
        if not self.rows:
            self.rows = self._rows_needed()
        if not self.images_per_row:
            self.images_per_row = min(self.batch_size, 4 * -(-self.batch_size // self.rows))
        if self.rows * self.images_per_row < self.batch_size:
            raise InputError(
                f"{self.rows} rows of {self.images_per_row} images hold no batch of "
                f"{self.batch_size}; give more rows, or a larger images_per_row"
            )

    def _rows_needed(self) -> int:
        """Returns a number of rows that is enough for most batches."""
        samples = np.unique(np.linspace(0, len(self.source) - 1, LOOKED_AT).astype(int))
        budgets = self._budgets(0, samples)
        counts = []
        for at in range(0, len(samples), 32):
            pictures = self.source.batch(samples[at : at + 32])[0]
            for picture, budget in zip(pictures, budgets[at : at + 32], strict=True):
                rows, columns = self._grid(picture.shape[:2], int(budget))
                counts.append(rows * columns)
        # Packed like batches, since rows have gaps. The largest batches get fewer patches.
        drawn = uniforms(self.seed, "naflex-rows", 0, np.arange(TRIED), self.batch_size)
        picked = (drawn * len(counts)).astype(int)
        needed = [len(assign([counts[i] for i in row], self.row_length)) for row in picked]
        return sorted(needed)[TRIED * 3 // 4]

    def _budgets(self, epoch: int, samples: np.ndarray) -> np.ndarray:
        """Returns the largest number of patches of each image, before all are fitted into rows."""
        if self.min_num_patches == self.max_num_patches:
            return np.full(len(samples), self.max_num_patches)
        drawn = uniforms(self.seed, "naflex-length", epoch, samples, 1)[:, 0]
        span = self.max_num_patches - self.min_num_patches + 1
        return self.min_num_patches + (drawn * span).astype(int)

    def _grid(self, shape: tuple[int, ...], budget: int) -> Grid:
        return grid_of(shape[0], shape[1], self.patch_size, budget, self.enlarge)

    def make(self, epoch: int, number: int) -> tuple[dict[str, np.ndarray], Any, np.ndarray]:
        """Returns one batch: patches and grids, labels, and weights."""
        start = number * self.batch_size
        samples = self.order(epoch)[start : start + self.batch_size]
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
        """Returns the boxes to crop: (B, 4), left, top, right, bottom.

        The aspect ratio of a crop is near that of its image.
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

        If a batch does not fit, all of its images get fewer patches.
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
        image = with_channels(image, self.channels or image.shape[-1])
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
        width = self.patch_size**2 * images[0].shape[-1]
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
        # Keras computes the mean over all places; with these weights it is the mean over images.
        weights *= np.float32(weights.size / len(images))
        return {"pixel_values": values, "spatial_shapes": shapes}, targets, weights
