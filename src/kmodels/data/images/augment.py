"""Augmentation of image batches in NumPy, the same on every backend and with any workers.

Each sample's numbers depend on (seed, epoch, sample) alone. MixUp and CutMix mix the samples at
places 2k and 2k + 1 of the epoch's order, so even they do not depend on the batch size.
"""

from dataclasses import dataclass

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.images.rand_augment import rand_augment
from kmodels.data.images.resizing import Resizing
from kmodels.data.rng import symmetric_beta, uniforms


@dataclass(frozen=True)
class Augment:
    """Augmentations of training images, applied in this order.

    Args:
        crop_padding: pads by so many black pixels on each side and crops the original size back.
        random_resized_crop: (smallest, largest) share of the area to crop, with an aspect ratio
            between 3/4 and 4/3, before resizing; instead of crop_padding (Szegedy et al. 2014).
        flip: flips left to right with probability 1/2.
        rand_augment: (n, m): n random operations of strength m of 10 (Cubuk et al. 2019).
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
        low, high = self.random_resized_crop
        area, ratio, down, right = uniforms(seed, "resized-crop", epoch, samples, 4).T
        heights, widths = shapes.T.astype("float64")
        ratio = np.exp((2 * ratio - 1) * np.log(4 / 3))
        area = (low + area * (high - low)) * heights * widths
        # Clipped instead of drawn again until it fits, so that each sample uses as many numbers.
        box_h = np.minimum(np.sqrt(area / ratio), heights)
        box_w = np.minimum(np.sqrt(area * ratio), widths)
        left, top = (widths - box_w) * right, (heights - box_h) * down
        return np.stack([left, top, left + box_w, top + box_h], axis=1)

    def pixels(self, images: np.ndarray, seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
        """Crops with padding, flips, and RandAugment.

        Args:
            images: uint8 or float32 (B, H, W, C), values from 0 to 255.
            seed: seed of the run.
            epoch: from 0.
            samples: (B,) sample numbers.

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
            drawn = uniforms(seed, "rand-augment", epoch, samples, 2 * count)
            images = rand_augment(images, drawn.reshape(-1, count, 2), strength)
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
        chosen, area, ratio, down, right = uniforms(seed, "erasing", epoch, samples, 5).T
        height, width = images.shape[1:3]
        ratio = np.exp((2 * ratio - 1) * np.log(10 / 3))
        area = (0.02 + area * (1 / 3 - 0.02)) * height * width
        box_h = np.minimum(np.round(np.sqrt(area * ratio)), height).astype(int)
        box_w = np.minimum(np.round(np.sqrt(area / ratio)), width).astype(int)
        top = (down * (height - box_h + 1)).astype(int)
        left = (right * (width - box_w + 1)).astype(int)
        for row in np.flatnonzero(chosen < self.erasing):
            images[row, top[row] : top[row] + box_h[row], left[row] : left[row] + box_w[row]] = 0.0

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
        box_h = np.round(np.sqrt(1 - stays) * height).astype(int)
        box_w = np.round(np.sqrt(1 - stays) * width).astype(int)
        top = (down * (height - box_h + 1)).astype(int)
        left = (right * (width - box_w + 1)).astype(int)
        stays = np.where(mixes_all, stays, 1 - box_h * box_w / (height * width))
        mixed = images.copy()
        pictures = images[:rows].reshape(-1, 2, *images.shape[1:])
        result = mixed[:rows].reshape(pictures.shape)
        kept = stays.astype("float32")[:, None, None, None, None]
        result[mixes_all] = (pictures * kept + pictures[:, ::-1] * (1 - kept))[mixes_all]
        for pair in np.flatnonzero(~mixes_all):
            area = np.s_[top[pair] : top[pair] + box_h[pair], left[pair] : left[pair] + box_w[pair]]
            for one in (0, 1):
                result[pair, one][area] = pictures[pair, 1 - one][area]
        targets = labels.copy()
        given = labels[:rows].reshape(-1, 2, labels.shape[-1])
        kept = kept[:, :, 0, 0]
        targets[:rows] = (given * kept + given[:, ::-1] * (1 - kept)).reshape(rows, -1)
        return mixed, targets


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
