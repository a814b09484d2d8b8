"""Augmentation of image batches in NumPy, the same on every backend and with any workers.

Each sample's numbers depend on (seed, epoch, sample) alone. MixUp and CutMix mix the samples at
places 2k and 2k + 1 of the epoch's order, so even they do not depend on the batch size.

The distributions are timm's, so that settings can be copied; docs/start/timm_and_transformers.md
lists them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kmodels.core.errors import InputError
from kmodels.data.images.rand_augment import rand_augment
from kmodels.data.images.resizing import Resizing
from kmodels.data.rng import symmetric_beta, uniforms

# Rectangles that are drawn per image until one fits, and the numbers of a crop: area and aspect
# ratio of each, then the position.
TRIES = 10
CROP_NUMBERS = 2 * TRIES + 2


@dataclass(frozen=True)
class Augment:
    """Augmentations of training images, applied in this order.

    Args:
        crop_padding: pads by so many black pixels on each side and crops the original size back.
        random_resized_crop: (smallest, largest) share of the area to crop, with an aspect ratio
            between 3/4 and 4/3, before resizing; instead of crop_padding (Szegedy et al. 2014).
        flip: flips left to right with probability 1/2.
        rand_augment: (n, m): RandAugment with n operations of magnitude m, 0 to 10, each applied
            with probability 1/2 (Cubuk et al. 2019; timm's "rand-m<m>-n<n>-inc1").
        erasing: probability of setting a rectangle to the mean colour (Zhong et al. 2017).
        mixup: alpha of Beta(alpha, alpha), 0 for none (Zhang et al. 2017).
        cutmix: alpha of Beta(alpha, alpha), 0 for none (Yun et al. 2019). If both are given, each
            pair of samples takes one of them with probability 1/2.
        num_classes: needed by mixup and cutmix, which give one-hot labels.

    Raises:
        InputError: for a value outside its range.
    """

    flip: bool = False
    crop_padding: int = 0
    random_resized_crop: tuple[float, float] | None = None
    rand_augment: tuple[int, float] | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise InputError(f"crop_padding is {self.crop_padding}; give at least 0 pixels")
        if self.random_resized_crop is not None:
            if self.crop_padding:
                raise InputError("crop_padding and random_resized_crop are both set; choose one")
            low, high = self.random_resized_crop
            if not 0 < low <= high <= 1:
                raise InputError(
                    f"random_resized_crop is {self.random_resized_crop}; give shares of the area "
                    "with 0 < smallest <= largest <= 1"
                )
        if self.rand_augment is not None:
            count, strength = self.rand_augment
            if count < 1 or not 0 <= strength <= 10:
                raise InputError(
                    f"rand_augment is {self.rand_augment}; give (n, m) with n >= 1, 0 <= m <= 10"
                )
        if not 0 <= self.erasing <= 1:
            raise InputError(f"erasing is {self.erasing}; give a probability from 0 to 1")
        if not (self.mixup >= 0 and self.cutmix >= 0):
            raise InputError(f"mixup is {self.mixup}, cutmix {self.cutmix}; give at least 0")
        if self.mixes and not self.num_classes:
            raise InputError("mixup and cutmix give one-hot labels; set num_classes")

    @property
    def mixes(self) -> bool:
        """True if labels become one-hot."""
        return self.mixup > 0 or self.cutmix > 0

    def boxes(self, shapes: np.ndarray, seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
        """Areas for random_resized_crop.

        Args:
            shapes: (B, 2), height and width of each image.
            seed: seed of the run.
            epoch: from 0.
            samples: (B,) sample numbers.

        Returns:
            float64 (B, 4): left, top, right, bottom in pixels.
        """
        assert self.random_resized_crop is not None
        drawn = uniforms(seed, "resized-crop", epoch, samples, CROP_NUMBERS)
        return crop_boxes(drawn, shapes, self.random_resized_crop, np.ones(len(shapes)))

    def pixels(
        self,
        images: np.ndarray,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        mean: ArrayLike,
    ) -> np.ndarray:
        """Crops with padding, flips, and RandAugment.

        Args:
            images: uint8 or float32 (B, H, W, C), values from 0 to 255.
            seed: seed of the run.
            epoch: from 0.
            samples: (B,) sample numbers.
            mean: mean of pixels / 255, one or one per channel: the colour with which RandAugment
                fills what it moves into the image.

        Returns:
            Returns new images; those given stay as they are.
        """
        drawn = uniforms(seed, "crop", epoch, samples, 3)
        if pad := self.crop_padding:
            height, width = images.shape[1:3]
            padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (1, 2))
            down, right = (drawn[:, :2] * (2 * pad + 1)).astype(int).T
            images = np.moveaxis(windows[np.arange(len(images)), down, right], 1, -1)
        if self.flip:
            flipped = (drawn[:, 2] < 0.5)[:, None, None, None]
            images = np.where(flipped, images[:, :, ::-1], images)
        if self.rand_augment is not None:
            count, strength = self.rand_augment
            drawn = uniforms(seed, "rand-augment", epoch, samples, 3 * count)
            fill = np.minimum(np.round(255 * np.array(mean)), 255).astype("uint8")
            images = rand_augment(images, drawn.reshape(-1, count, 3), strength, fill)
        return images

    def erase(self, images: np.ndarray, seed: int, epoch: int, samples: np.ndarray) -> None:
        """Erases at random, in place.

        Args:
            images: float32 (B, H, W, C), normalised: zero is the mean colour.
            seed: seed of the run.
            epoch: from 0.
            samples: (B,) sample numbers.
        """
        if not self.erasing:
            return
        drawn = uniforms(seed, "erasing", epoch, samples, 1 + CROP_NUMBERS)
        shape = np.array(images.shape[1:3])
        sizes, fits = _first_that_fits(
            drawn[:, 1:-2], np.tile(shape, (len(images), 1)), (0.02, 1 / 3), 10 / 3, shape - 1
        )
        corners = (drawn[:, -2:] * (shape - sizes + 1)).astype(int)
        for row in np.flatnonzero((drawn[:, 0] < self.erasing) & fits):
            (top, left), (bottom, right) = corners[row], corners[row] + sizes[row]
            images[row, top:bottom, left:right] = 0.0

    def mix(
        self, images: np.ndarray, labels: np.ndarray, seed: int, epoch: int, pairs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mixes the rows 2k and 2k + 1 by MixUp or CutMix; a last row without a partner stays.

        Args:
            images: float32 (B, H, W, C).
            labels: float32 (B, classes).
            seed: seed of the run.
            epoch: from 0.
            pairs: (B // 2,) numbers of the pairs in the epoch's order.

        Returns:
            images and labels, mixed.
        """
        if not self.mixes or not len(pairs):
            return images, labels
        height, width = images.shape[1:3]
        rows = 2 * len(pairs)
        which, share, down, right = uniforms(seed, "mix", epoch, pairs, 4).T
        mixes_all = (which < 0.5) if self.mixup and self.cutmix else np.full(len(pairs), self.mixup)
        mixes_all = mixes_all.astype(bool)
        # Share of the image that stays.
        stays = np.where(
            mixes_all,
            symmetric_beta(share, self.mixup) if self.mixup else 0.0,
            symmetric_beta(share, self.cutmix) if self.cutmix else 0.0,
        )
        # The box has a random centre and is cut off at the border, so more stays than was drawn.
        side = np.sqrt(1 - stays)
        box_h, box_w = (side * height).astype(int), (side * width).astype(int)
        middle_y, middle_x = (down * height).astype(int), (right * width).astype(int)
        top, left = np.maximum(middle_y - box_h // 2, 0), np.maximum(middle_x - box_w // 2, 0)
        bottom = np.minimum(middle_y + (box_h + 1) // 2, height)
        end = np.minimum(middle_x + (box_w + 1) // 2, width)
        cut = (bottom - top) * (end - left) / (height * width)
        stays = np.where(mixes_all, stays, 1 - cut)
        mixed = images.copy()
        pictures = images[:rows].reshape(-1, 2, *images.shape[1:])
        result = mixed[:rows].reshape(pictures.shape)
        kept = stays.astype("float32")[:, None, None, None, None]
        result[mixes_all] = (pictures * kept + pictures[:, ::-1] * (1 - kept))[mixes_all]
        for pair in np.flatnonzero(~mixes_all):
            area = np.s_[top[pair] : bottom[pair], left[pair] : end[pair]]
            for one in (0, 1):
                result[pair, one][area] = pictures[pair, 1 - one][area]
        targets = labels.copy()
        given = labels[:rows].reshape(-1, 2, labels.shape[-1])
        kept = kept[:, :, 0, 0]
        targets[:rows] = (given * kept + given[:, ::-1] * (1 - kept)).reshape(rows, -1)
        return mixed, targets


def crop_boxes(
    drawn: np.ndarray, shapes: np.ndarray, share: tuple[float, float], middle: np.ndarray
) -> np.ndarray:
    """Returns the boxes of a random resized crop.

    Of ten rectangles the first that fits into its image is taken; if none does, the largest box in
    the middle of the image whose aspect ratio is allowed.

    Args:
        drawn: (B, CROP_NUMBERS) in [0, 1).
        shapes: (B, 2), height and width of each image.
        share: smallest and largest share of the area.
        middle: (B,), the aspect ratio (width / height), which varies by a factor of 4/3.

    Returns:
        float64 (B, 4): left, top, right, bottom in whole pixels.

    Source:
        timm 1.0, `timm.data.transforms.RandomResizedCropAndInterpolation`.
    """
    sizes, fits = _first_that_fits(drawn[:, :-2], shapes, share, 4 / 3, shapes, middle)
    corners = (drawn[:, -2:] * (shapes - sizes + 1)).astype(int)
    heights, widths = shapes.T
    lowest, highest = middle * 3 / 4, middle * 4 / 3
    largest = np.stack(
        [
            np.minimum(np.rint(widths / lowest), heights),
            np.minimum(np.rint(heights * highest), widths),
        ],
        axis=1,
    )
    sizes = np.where(fits[:, None], sizes, largest)
    corners = np.where(fits[:, None], corners, (shapes - sizes) // 2)
    return np.concatenate([corners[:, ::-1], (corners + sizes)[:, ::-1]], axis=1).astype("float64")


def _first_that_fits(
    drawn: np.ndarray,
    shapes: np.ndarray,
    share: tuple[float, float],
    factor: float,
    most: np.ndarray,
    middle: np.ndarray | float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sizes (B, 2) of rectangles, height and width, and (B,) whether one fits.

    Args:
        drawn: (B, 2 * TRIES) in [0, 1).
        shapes: (B, 2), height and width of each image.
        share: smallest and largest share of the image's area.
        factor: largest factor between the aspect ratio and `middle`.
        most: (B, 2) or (2,), the largest height and width.
        middle: (B,) or a number, the aspect ratio in the middle.
    """
    areas, ratios = np.moveaxis(drawn.reshape(-1, TRIES, 2), 2, 0)
    low, high = share
    areas = (low + areas * (high - low)) * shapes.prod(1, keepdims=True)
    ratios = np.exp((2 * ratios - 1) * np.log(factor)) * np.reshape(middle, (-1, 1))
    sizes = np.rint(np.sqrt(np.stack([areas / ratios, areas * ratios], axis=2))).astype(int)
    fit = np.all((sizes > 0) & (sizes <= np.reshape(most, (-1, 1, 2))), axis=2)
    rows, first = np.arange(len(drawn)), fit.argmax(1)
    return sizes[rows, first], fit[rows, first]


def crop_and_resize(
    pictures: list[np.ndarray] | np.ndarray,
    boxes: np.ndarray,
    size: tuple[int, int],
    resizing: Resizing,
) -> np.ndarray:
    """Cuts each image's box out and resizes it; (B, *size, C)."""
    return np.stack(
        [
            resizing(picture, size, tuple(box))
            for picture, box in zip(pictures, boxes.tolist(), strict=True)
        ]
    )
