"""Augmentation of image batches in NumPy, the same on every backend and with any workers.

The random numbers of a sample depend on (seed, epoch, sample) alone. MixUp and CutMix mix samples
2k and 2k + 1 in the order of the epoch, so they do not depend on the batch size either.

The distributions are timm's, so that settings can be copied; docs/start/timm_and_transformers.md
lists them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from kmodels.core.arguments import check_fields
from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.data.rng import symmetric_beta, uniforms

# Largest number of rectangles that are drawn until one fits, and random numbers of a crop: area and
# aspect ratio of each rectangle, then the position.
TRIES = 10
CROP_NUMBERS = 2 * TRIES + 2


@dataclass(frozen=True)
class Augment:
    """Augmentations of training images, applied in this order.

    Args:
        crop_padding: black pixels to pad on each side before a random crop of the original size.
        random_resized_crop: (smallest, largest) share of the area to crop, with an aspect ratio
            between 3/4 and 4/3, before resizing; instead of crop_padding (Szegedy et al. 2014).
        flip: flips left to right with probability 1/2.
        three_augment: DeiT III's 3-Augment (Touvron et al. 2022): grayscale, solarize or blur, each
            with probability 1/3, then colour jitter of this strength; None for none.
        rand_augment: (n, m): RandAugment with n operations of magnitude m, 0 to 10, each applied
            with probability 1/2 (Cubuk et al. 2019; timm's "rand-m<m>-n<n>-inc1"); (n, m, d) draws
            magnitudes from a normal distribution of deviation d ("-mstd<d>").
        rand_augment_kind: "timm", or "big_vision" for its operations, which are always applied and
            include Cutout.
        erasing: probability of setting a rectangle to the mean colour (Zhong et al. 2017).
        erasing_noise: fills the rectangle with normal noise, as timm's mode "pixel".
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
    three_augment: float | None = None
    rand_augment: tuple[int, float] | tuple[int, float, float] | None = None
    rand_augment_kind: str = "timm"
    erasing: float = 0.0
    erasing_noise: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
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
            count, strength, *deviation = self.rand_augment
            if not 1 <= count <= 100 or not 0 <= strength <= 10 or min(deviation, default=0) < 0:
                raise InputError(
                    f"rand_augment is {self.rand_augment}; give (n, m) with 100 >= n >= 1, "
                    "0 <= m <= 10, or (n, m, d) with a deviation d >= 0"
                )
            if self.rand_augment_kind == "big_vision" and deviation:
                raise InputError("rand_augment of big_vision has no deviation; give (n, m)")
        if self.rand_augment_kind not in ("timm", "big_vision"):
            raise InputError(
                f"rand_augment_kind is {self.rand_augment_kind!r}; give timm or big_vision"
            )
        if self.three_augment is not None:
            check_number("three_augment", self.three_augment, least=0, most=1)
        check_number("erasing", self.erasing, least=0, most=1)
        if self.erasing_noise and not self.erasing:
            raise InputError("erasing_noise has no effect without erasing; give a probability")
        if self.rand_augment_kind != "timm" and self.rand_augment is None:
            raise InputError(
                f"rand_augment_kind={self.rand_augment_kind} has no effect without rand_augment; "
                "give (n, m)"
            )
        if not (self.mixup >= 0 and self.cutmix >= 0):
            raise InputError(f"mixup is {self.mixup}, cutmix {self.cutmix}; give at least 0")
        if self.num_classes is not None:
            check_whole("num_classes", self.num_classes)
        if self.mixes and not self.num_classes:
            raise InputError("mixup and cutmix give one-hot labels; set num_classes")

    @property
    def mixes(self) -> bool:
        """True if images are mixed, so that labels become one-hot."""
        return self.mixup > 0 or self.cutmix > 0

    def boxes(self, shapes: np.ndarray, seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
        """Returns the boxes of random_resized_crop.

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
        self, images: np.ndarray, seed: int, epoch: int, samples: np.ndarray, mean: ArrayLike
    ) -> np.ndarray:
        """Applies padded crops, flips, 3-Augment and RandAugment.

        Args:
            images: uint8 or float32 (B, H, W, C), values from 0 to 255.
            seed: seed of the run.
            epoch: from 0.
            samples: (B,) sample numbers.
            mean: mean of pixels / 255, one or one per channel: the colour with which RandAugment
                fills areas from outside the image.

        Returns:
            New images of the same shape and dtype.
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
        if self.three_augment is not None:
            drawn = uniforms(seed, "three-augment", epoch, samples, 6)
            images = three_augment(images, drawn, self.three_augment)
        if self.rand_augment is not None:
            count, strength, *deviation = self.rand_augment
            drawn = uniforms(seed, "rand-augment", epoch, samples, 4 * count)
            if self.rand_augment_kind == "big_vision":
                return big_vision_augment(images, drawn.reshape(-1, count, 4), strength)
            drawn = drawn[:, : 3 * count].reshape(-1, count, 3)
            strengths: float | np.ndarray = strength
            if deviation and deviation[0]:
                share = uniforms(seed, "magnitude", epoch, samples, count)
                normal = np.vectorize(NormalDist().inv_cdf)(np.maximum(share, 2.0**-53))
                strengths = np.clip(strength + deviation[0] * normal, 0, 10)
            fill = np.minimum(np.round(255 * np.array(mean)), 255).astype("uint8")
            images = rand_augment(images, drawn, strengths, fill)
        return images

    def erase(self, images: np.ndarray, seed: int, epoch: int, samples: np.ndarray) -> None:
        """Erases random rectangles, in place.

        Args:
            images: float32 (B, H, W, C), normalised, so that zero is the mean colour.
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
            area = images[row, top:bottom, left:right]
            area[...] = 0.0
            if self.erasing_noise:
                share = uniforms(seed, "noise", epoch, samples[row : row + 1], 2 * area.size)
                size, angle = share.reshape(2, *area.shape)
                area[...] = np.sqrt(-2 * np.log1p(-size)) * np.cos(2 * np.pi * angle)

    def mix(
        self, images: np.ndarray, labels: np.ndarray, seed: int, epoch: int, pairs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mixes rows 2k and 2k + 1 by MixUp or CutMix; a last row without a partner is unchanged.

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
        # Share of the image that remains.
        stays = np.where(
            mixes_all,
            symmetric_beta(share, self.mixup) if self.mixup else 0.0,
            symmetric_beta(share, self.cutmix) if self.cutmix else 0.0,
        )
        # The box has a random centre and is cut at the border, so more remains than was drawn.
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
        weight = stays.astype("float32")[:, None, None, None, None]
        result[mixes_all] = (pictures * weight + pictures[:, ::-1] * (1 - weight))[mixes_all]
        for pair in np.flatnonzero(~mixes_all):
            area = np.s_[top[pair] : bottom[pair], left[pair] : end[pair]]
            for one in (0, 1):
                result[pair, one][area] = pictures[pair, 1 - one][area]
        targets = labels.copy()
        both = labels[:rows].reshape(-1, 2, labels.shape[-1])
        weight = weight[:, :, 0, 0]
        targets[:rows] = (both * weight + both[:, ::-1] * (1 - weight)).reshape(rows, -1)
        return mixed, targets


def crop_boxes(
    drawn: np.ndarray, shapes: np.ndarray, share: tuple[float, float], middle: np.ndarray
) -> np.ndarray:
    """Returns the boxes of a random resized crop.

    The first of ten rectangles that fits into its image is used; if none does, the largest centred
    box with an allowed aspect ratio.

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
    """Returns the sizes (B, 2) of rectangles, (height, width), and (B,) True if one fits.

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


# uint8 images (B, H, W, C); the magnitude from 0 to 1; a sign -1 or 1 for each image; the colour of
# areas from outside of an image, uint8, one value or one per channel.
Operation = Callable[[np.ndarray, float, np.ndarray, np.ndarray], np.ndarray]
# The probability with which each of the n operations is applied.
APPLIED = 0.5


def rand_augment(
    images: np.ndarray, drawn: np.ndarray, magnitude: float | np.ndarray, fill: np.ndarray
) -> np.ndarray:
    """Applies random operations (RandAugment, Cubuk et al. 2019), like timm's "inc1".

    Each operation runs once for all images that drew it, in NumPy, so that the result is bit-equal
    with any version of Pillow.

    Args:
        images: uint8 or float32 (B, H, W, C), values from 0 to 255.
        drawn: (B, n, 3) in [0, 1): which operation, its sign, and whether it is applied.
        magnitude: 0 to 10, a number or one for each operation of each image, (B, n).
        fill: uint8 (1,) or (C,), the colour of areas from outside of an image.

    Returns:
        New images of the same dtype, rounded to whole numbers.

    Source:
        timm 1.0, `timm.data.auto_augment`, with Pillow's arithmetic.
    """
    result = np.clip(np.round(images), 0, 255).astype("uint8")
    amounts = np.broadcast_to(np.asarray(magnitude) / 10, drawn.shape[:2]).T
    for amount, (which, sign, applied) in zip(amounts, drawn.transpose(1, 2, 0), strict=True):
        numbers = np.where(applied < APPLIED, (which * len(OPERATIONS)).astype(int), -1)
        signs = np.where(sign < 0.5, -1.0, 1.0)
        for number in np.unique(numbers[numbers >= 0]):
            group = np.flatnonzero(numbers == number)
            alike = len(set(amount[group].tolist())) == 1
            for rows in [group] if alike else group[:, None]:
                own = float(amount[rows[0]])
                result[rows] = OPERATIONS[number](result[rows], own, signs[rows], fill)
    return result.astype(images.dtype)


def big_vision_augment(images: np.ndarray, drawn: np.ndarray, magnitude: float) -> np.ndarray:
    """Applies big_vision's RandAugment, in which all operations are always applied.

    Args:
        images: uint8 or float32 (B, H, W, C), values from 0 to 255.
        drawn: (B, n, 4) in [0, 1): which operation, its sign, and the centre of Cutout (y, x).
        magnitude: 0 to 10.

    Returns:
        New images of the same dtype, rounded to whole numbers.

    Source:
        big_vision, `pp/autoaugment.py`, `distort_image_with_randaugment`. Its contrast blends with
        the number of pixels / 256 instead of the mean, as here.
    """
    result = np.clip(np.round(images), 0, 255).astype("uint8")
    amount, (height, width), gray = magnitude / 10, images.shape[1:3], np.array([128], "uint8")
    # Factors are 0.1 + 1.8 * amount; `_blend` has them as 1 + 0.9 * change.
    change, half = 2 * amount - 1, int(amount * 40)
    mean = np.full(1, min(height * width // 256, 255), "float32")

    def enhanced(kind: Operation) -> Callable[..., np.ndarray]:
        return lambda x, sign, y, x0: kind(x, change, np.ones(len(x)), gray)

    def plain(kind: Operation) -> Callable[..., np.ndarray]:
        return lambda x, sign, y, x0: kind(x, amount, sign, gray)

    def moved(x: np.ndarray, right: np.ndarray, down: np.ndarray) -> np.ndarray:
        return _affine(x, gray, (1.0, 0.0, 100 * amount * right), (0.0, 1.0, 100 * amount * down))

    def cutout(x: np.ndarray, sign: np.ndarray, y: np.ndarray, x0: np.ndarray) -> np.ndarray:
        rows = np.abs(np.arange(height) + 0.5 - (y * height).astype(int)[:, None]) < half
        columns = np.abs(np.arange(width) + 0.5 - (x0 * width).astype(int)[:, None]) < half
        return np.where((rows[:, :, None] & columns[:, None])[..., None], gray, x)

    operations = (
        *(plain(kind) for kind in (_autocontrast, _equalize, _invert, _rotate)),
        lambda x, sign, y, x0: x & np.uint8((0xFF << (8 - int(amount * 4))) & 0xFF),
        lambda x, sign, y, x0: np.where(x >= int(amount * 256), 255 - x, x),
        enhanced(_color),
        enhanced(lambda x, amount, sign, fill: _blend(x, mean, amount, sign)),
        *(enhanced(kind) for kind in (_brightness, _sharpness)),
        *map(plain, SHEARS),
        lambda x, sign, y, x0: moved(x, sign, 0 * sign),
        lambda x, sign, y, x0: moved(x, 0 * sign, sign),
        cutout,
        plain(_solarize_add),
    )
    for which, sign, y, x in drawn.transpose(1, 2, 0):
        numbers, signs = (which * 16).astype(int), np.where(sign < 0.5, -1.0, 1.0)
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            result[rows] = operations[number](result[rows], signs[rows], y[rows], x[rows])
    return result.astype(images.dtype)


def three_augment(images: np.ndarray, drawn: np.ndarray, strength: float) -> np.ndarray:
    """Applies DeiT III's 3-Augment: grayscale, solarize or Gaussian blur, then colour jitter.

    Args:
        images: uint8 or float32 (B, H, W, C), values from 0 to 255.
        drawn: (B, 6) in [0, 1): which of the three, the radius of the blur, the order of the
            jitter, and the factors of brightness, contrast and saturation.
        strength: the factors are from 1 - strength to 1 + strength.

    Returns:
        New images of the same dtype, rounded to whole numbers.

    Source:
        facebookresearch/deit, `augment.py`; torchvision, `ColorJitter`. Pillow approximates the
        Gaussian by boxes.
    """
    result = np.clip(np.round(images), 0, 255).astype("uint8")
    which, fill = (drawn[:, 0] * 3).astype(int), np.zeros(1, "uint8")
    gray, bright, blurred = (which == number for number in range(3))
    result[gray] = _luma(result[gray])
    result[bright] = np.where(result[bright] < 128, result[bright], 255 - result[bright])
    for row in np.flatnonzero(blurred):
        result[row] = _blur(result[row], 0.1 + 1.9 * drawn[row, 1])
    orders = np.array(list(permutations(range(3))))[(drawn[:, 2] * 6).astype(int)]
    changes = strength * (2 * drawn[:, 3:] - 1)
    for number in orders.T if strength else ():
        for one, change in enumerate((_brightness, _contrast, _color)):
            rows = np.flatnonzero(number == one)
            if len(rows):  # `_blend` adds 0.9 times its arguments to a factor of 1
                result[rows] = change(result[rows], 1 / 0.9, changes[rows, one], fill)
    return result.astype(images.dtype)


def photometric_distortion(image: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Changes brightness, contrast, saturation and hue, each with probability 1/2.

    Args:
        image: uint8 or float32 (H, W, C), values from 0 to 255.
        drawn: (9,) in [0, 1): for brightness, contrast, saturation and hue, in pairs, whether it
            changes and by how much; last, whether contrast changes second or last.

    Returns:
        A new image of the same dtype, of whole numbers.

    Source:
        facebookresearch/dinov3, `eval/segmentation/transforms.py`, and torchvision's
        `adjust_saturation` and `adjust_hue`; the distortion is that of mmsegmentation.
    """

    def contrast(x: np.ndarray) -> np.ndarray:
        return _bytes(x * np.float32(0.5 + drawn[3])) if drawn[2] < 0.5 else x

    result = np.clip(np.round(image), 0, 255).astype("uint8")
    if drawn[0] < 0.5:
        result = _bytes(result + np.float32(64 * drawn[1] - 32))
    if drawn[8] < 0.5:
        result = contrast(result)
    if image.shape[-1] == 3:
        if drawn[4] < 0.5:
            gray = _bytes(result @ np.array([0.2989, 0.587, 0.114], "float32"))[..., None]
            share = np.float32(0.5 + drawn[5])
            result = _bytes(share * result + (1 - share) * gray)
        if drawn[6] < 0.5:
            result = _turned_hue(result, drawn[7] - 0.5)
    if drawn[8] >= 0.5:
        result = contrast(result)
    return result.astype(image.dtype)


def _turned_hue(image: np.ndarray, share: float) -> np.ndarray:
    """Returns a uint8 image (H, W, 3) with its hue turned by a share of the circle."""
    r, g, b = np.moveaxis(image.astype("float32") / 255, -1, 0)
    value, low = np.maximum(np.maximum(r, g), b), np.minimum(np.minimum(r, g), b)
    chroma = value - low
    unit = np.where(chroma == 0, 1, chroma)
    sixths = np.where(
        value == r, (g - b) / unit, np.where(value == g, 2 + (b - r) / unit, 4 + (r - g) / unit)
    )
    sixths = sixths + 6 * share
    place = (np.array([5, 3, 1]) + sixths[..., None]) % 6
    part = np.clip(np.minimum(place, 4 - place), 0, 1)
    return _bytes((value[..., None] - chroma[..., None] * part) * 255.999)


def _blur(image: np.ndarray, deviation: float) -> np.ndarray:
    """Returns a uint8 image (H, W, C) after a Gaussian blur, whose border is repeated."""
    reach = int(np.ceil(4 * deviation))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    weights /= weights.sum()
    blurred = image.astype("float64")
    for axis in (0, 1):
        pad = [(reach, reach) if axis == one else (0, 0) for one in range(3)]
        windows = np.lib.stride_tricks.sliding_window_view(
            np.pad(blurred, pad, mode="edge"), len(weights), axis
        )
        blurred = windows @ weights
    return _bytes(blurred + 0.5)


def _autocontrast(
    images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray
) -> np.ndarray:
    low = images.min((1, 2), keepdims=True).astype("float64")
    high = images.max((1, 2), keepdims=True).astype("float64")
    flat = high == low
    scale = np.where(flat, 1.0, 255.0 / np.where(flat, 1.0, high - low))
    return _bytes(images * scale - np.where(flat, 0.0, low) * scale)


def _equalize(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    planes = np.moveaxis(images, -1, 1).reshape(-1, images[0, ..., 0].size)
    offsets = np.arange(len(planes))[:, None] * 256
    counts = np.bincount((planes + offsets).ravel(), minlength=len(planes) * 256).reshape(-1, 256)
    # Like Pillow, this leaves the last occupied bin out of the step.
    last = 255 - (counts[:, ::-1] > 0).argmax(1)
    step = (planes.shape[1] - counts[np.arange(len(planes)), last]) // 255
    before = np.cumsum(counts, 1) - counts
    table = np.clip((step[:, None] // 2 + before) // np.maximum(step, 1)[:, None], 0, 255)
    table = np.where(step[:, None] == 0, np.arange(256), table)
    planes = np.take_along_axis(table, planes.astype(int), 1).astype("uint8")
    batch, height, width, channels = images.shape
    return np.moveaxis(planes.reshape(batch, channels, height, width), 1, -1)


def _invert(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    return 255 - images


def _posterize(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    dropped = 4 + int(amount * 4)
    return images & np.uint8((0xFF << dropped) & 0xFF)


def _solarize(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    return np.where(images >= 256 - int(amount * 256), 255 - images, images)


def _solarize_add(
    images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray
) -> np.ndarray:
    added = np.minimum(images.astype("int32") + int(amount * 110), 255).astype("uint8")
    return np.where(images < 128, added, images)


def _color(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    if images.shape[-1] == 1:
        return images
    return _blend(images, _luma(images), amount, sign)


def _contrast(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    grey = np.floor(_luma(images).mean((1, 2), keepdims=True, dtype="float64") + 0.5)
    return _blend(images, grey.astype("float32"), amount, sign)


def _brightness(
    images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray
) -> np.ndarray:
    return _blend(images, np.zeros(1, "float32"), amount, sign)


def _sharpness(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    smooth = images.astype("float32")
    if min(images.shape[1:3]) > 2:
        total = 4 * smooth[:, 1:-1, 1:-1]
        for down in range(3):
            for right in range(3):
                height, width = images.shape[1] - 2, images.shape[2] - 2
                total = total + smooth[:, down : down + height, right : right + width]
        smooth[:, 1:-1, 1:-1] = np.floor(total / 13 + 0.5)
    return _blend(images, smooth, amount, sign)


def _rotate(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    angle = np.deg2rad(30.0 * amount * sign)
    cos, sin = np.cos(angle), np.sin(angle)
    height, width = images.shape[1:3]
    middle_y, middle_x = height / 2, width / 2
    right = middle_x - cos * middle_x + sin * middle_y
    down = middle_y - sin * middle_x - cos * middle_y
    return _affine(images, fill, (cos, -sin, right), (sin, cos, down))


Row = tuple[float | np.ndarray, float | np.ndarray, float | np.ndarray]


def _affine(
    images: np.ndarray,
    fill: np.ndarray,
    column: Row = (1.0, 0.0, 0.0),
    row: Row = (0.0, 1.0, 0.0),
) -> np.ndarray:
    """Returns uint8 images (B, H, W, C) after an affine map, by nearest pixels.

    The pixel at (x, y) comes from column a x + b y + c for `column` (a, b, c), a number or (B,)
    each, and the same for its row; areas from outside of an image get the colour `fill`.
    """
    batch, height, width = images.shape[:3]
    y, x = np.arange(height)[None, :, None], np.arange(width)[None, None, :]

    def place(numbers: Row) -> np.ndarray:
        a, b, c = (np.broadcast_to(value, batch)[:, None, None] for value in numbers)
        # Fixed point with 16 bits, like Pillow: the last bits of a sine do not decide between two
        # pixels.
        a, b, c = (
            np.floor(value * 65536 + 0.5).astype("int64") for value in (a, b, c + (a + b) / 2)
        )
        return (a * x + b * y + c) >> 16

    columns, rows = place(column), place(row)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    taken = images[
        np.arange(batch)[:, None, None],
        np.clip(rows, 0, height - 1),
        np.clip(columns, 0, width - 1),
    ]
    return np.where(inside[..., None], taken, fill)


def _luma(images: np.ndarray) -> np.ndarray:
    if images.shape[-1] == 1:
        return images.astype("float32")
    # Integers, like Pillow: a matrix product would round differently on each machine.
    weighted = images.astype("int32") * np.array([19595, 38470, 7471], "int32")
    return ((weighted.sum(-1, keepdims=True) + 0x8000) >> 16).astype("float32")


def _blend(images: np.ndarray, other: np.ndarray, amount: float, sign: np.ndarray) -> np.ndarray:
    """Moves images away from `other` by up to 0.9 times the difference, or towards it."""
    factor = (1.0 + 0.9 * amount * sign).astype("float32")[:, None, None, None]
    return _bytes(other + (images - other) * factor)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0, 255).astype("uint8")  # truncates, like Pillow


SHEARS: tuple[Operation, ...] = (
    lambda x, amount, sign, fill: _affine(x, fill, column=(1.0, 0.3 * amount * sign, 0.0)),
    lambda x, amount, sign, fill: _affine(x, fill, row=(0.3 * amount * sign, 1.0, 0.0)),
)
TRANSLATIONS: tuple[Operation, ...] = (
    lambda x, amount, sign, fill: _affine(
        x, fill, column=(1.0, 0.0, 0.45 * amount * sign * x.shape[2])
    ),
    lambda x, amount, sign, fill: _affine(
        x, fill, row=(0.0, 1.0, 0.45 * amount * sign * x.shape[1])
    ),
)
OPERATIONS: tuple[Operation, ...] = (
    _autocontrast,
    _equalize,
    _invert,
    _rotate,
    _posterize,
    _solarize,
    _solarize_add,
    _color,
    _contrast,
    _brightness,
    _sharpness,
    *SHEARS,
    *TRANSLATIONS,
)
