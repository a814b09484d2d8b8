"""Resizing of images, like Pillow, or without antialiasing for models that need it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kmodels.core.arguments import check_fields
from kmodels.core.errors import InputError, check_choice

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
MODES = ("stretch", "cover", "fit", "crop", "none")


def sides_of(image_size: Any) -> tuple[int, int]:
    """Returns a size as (height, width); `InputError` unless these are whole numbers from 1."""
    try:
        sides = [int(side) for side in image_size]
        fits = len(sides) == 2 and min(sides) >= 1 and sides == [*image_size]
    except (TypeError, ValueError, OverflowError):
        fits, sides = False, []
    if not fits:
        raise InputError(f"image_size is {image_size}; give (height, width), each at least 1")
    return sides[0], sides[1]


@dataclass(frozen=True)
class Resizing:
    """Resizing of images to the input size of a model.

    Args:
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
        antialias: antialiasing when shrinking, like Pillow; must be True for "lanczos".
        crop_to_aspect_ratio: crops the largest center part of the target aspect ratio, instead of
            stretching the image.
        resize_size: the size before the center crop: the length of the shorter side, or (height,
            width); None to resize to the target size. Smaller images are padded.
        rounds_center: rounds the start of the center crop like torchvision and timm; False like
            transformers.
        resize_mode: "stretch", as above; "cover" keeps the aspect ratio and makes the image just
            large enough for a `resize_size` of (height, width), "fit" just small enough, padded
            with `fill`; "crop" crops the center without resizing, and "none" raises for images of
            another size.
        fill: values of padding, from 0 to 255; one, or one per channel.

    Attributes:
        keeps_bytes: True if uint8 images stay uint8.

    Raises:
        InputError: for an unknown interpolation or mode, or settings that do not fit together; and
            by a call with "none".
    """

    interpolation: str = "bilinear"
    antialias: bool = True
    crop_to_aspect_ratio: bool = False
    resize_size: int | tuple[int, int] | None = None
    rounds_center: bool = False
    resize_mode: str = "stretch"
    fill: tuple[int, ...] = (0,)
    keeps_bytes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.resize_size is not None:
            if not isinstance(self.resize_size, int):
                object.__setattr__(self, "resize_size", tuple(self.resize_size))
            sides = (self.resize_size,) if isinstance(self.resize_size, int) else self.resize_size
            if len(sides) > 2 or min(sides) < 1 or self.crop_to_aspect_ratio:
                raise InputError(
                    f"resize_size is {self.resize_size}; give the shorter side or (height, width), "
                    "at least 1, without crop_to_aspect_ratio"
                )
        check_choice("resize_mode", self.resize_mode, MODES)
        keeps = self.resize_mode in ("cover", "fit")
        fits = isinstance(self.resize_size, tuple) if keeps else self.resize_size is None
        if self.resize_mode != "stretch" and (self.crop_to_aspect_ratio or not fits):
            raise InputError(
                f"resize_mode is {self.resize_mode!r} with resize_size={self.resize_size}; give "
                f"{'(height, width)' if keeps else 'None'}, without crop_to_aspect_ratio"
            )
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        if not self.antialias and self.interpolation == "lanczos":
            raise InputError(
                "there is no interpolation='lanczos' with antialias=False; give antialias=True, or "
                "interpolation='bicubic'"
            )

    def __call__(
        self, image: np.ndarray, size: tuple[int, int], box: tuple | None = None
    ) -> np.ndarray:
        """Returns an image, or its part in `box`, resized to (height, width); see `resize`."""
        if box is None and self.resize_mode == "none" and image.shape[:2] != tuple(size):
            raise InputError(
                f"an image is {image.shape[0]} x {image.shape[1]} pixels and resize_mode is "
                f'"none"; give images of {size[0]} x {size[1]}, or another resize_mode'
            )
        if box is None and (self.resize_size is not None or self.resize_mode == "crop"):
            whole = self._whole(image)
            image = resize(image, whole, None, self.interpolation, self.antialias)
            return _centered(image, size, self.rounds_center, self.fill)
        if box is None and self.crop_to_aspect_ratio:
            image = middle(image, size)
        return resize(image, size, box, self.interpolation, self.antialias)

    @property
    def crops(self) -> bool:
        """True if parts of an image may be cropped."""
        whole = self.resize_size is None and not self.crop_to_aspect_ratio
        return not whole or self.resize_mode == "crop"

    def _whole(self, image: np.ndarray) -> tuple[int, int]:
        """Returns the size of an image before its center crop."""
        (height, width), side = image.shape[:2], self.resize_size
        if side is None:
            return height, width
        if not isinstance(side, int):
            if self.resize_mode == "stretch":
                return side
            choose = min if self.resize_mode == "cover" else max
            ratio = choose(height / side[0], width / side[1])
            return max(round(height / ratio), 1), max(round(width / ratio), 1)
        if height <= width:
            return side, int(side * width / height)
        return int(side * height / width), side


@dataclass(frozen=True)
class ResizingOfBytes(Resizing):
    """`Resizing` of uint8 images with Pillow, which stay uint8."""

    keeps_bytes: ClassVar[bool] = True


USUAL = Resizing()


def resize(
    image: np.ndarray,
    size: tuple[int, int],
    box: tuple | None = None,
    interpolation: str = "bilinear",
    antialias: bool = True,
) -> np.ndarray:
    """Returns an image resized to (height, width), in its dtype; see `Resizing`.

    Args:
        image: uint8 or float32 (H, W, C).
        size: (height, width).
        box: part of the image to use, (left, top, right, bottom) in pixels, may be fractions.
        interpolation: see `Resizing`.
        antialias: see `Resizing`.
    """
    from PIL import Image

    if box is None and image.shape[:2] == tuple(size):
        return image
    if not antialias and interpolation in KERNELS:
        return _between_nearest(image, size, box, *KERNELS[interpolation])
    target, method = (size[1], size[0]), Image.Resampling[interpolation.upper()]
    if image.dtype == np.uint8 and image.shape[-1] in (1, 3):
        pillow = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        return np.asarray(pillow.resize(target, method, box=box)).reshape(*size, -1)
    planes = [
        Image.fromarray(np.ascontiguousarray(plane, "float32")).resize(target, method, box=box)
        for plane in np.moveaxis(image, -1, 0)
    ]
    return np.stack([np.asarray(plane) for plane in planes], -1).astype(image.dtype)


def with_shorter_side(size: Sequence[int], side: int) -> tuple[int, int]:
    """Returns (height, width) in the same aspect ratio whose shorter side is `side`, rounded."""
    height, width = size
    short = min(height, width)
    return int(side * height / short + 0.5), int(side * width / short + 0.5)


def _triangle(x: np.ndarray) -> np.ndarray:
    return 1 - np.abs(x)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Returns the kernel of Keys 1981 with a = -0.5, at steps of 1/1024 as TensorFlow tables it."""
    x = np.round(np.abs(x) * 1024) / 1024
    near, far = (1.5 * x - 2.5) * x**2 + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x <= 1, near, far)


# The nearest pixels along an axis, counted from the one before the position, and their weights.
KERNELS = {"bilinear": ((0, 1), _triangle), "bicubic": ((-1, 0, 1, 2), _cubic)}


def _between_nearest(
    image: np.ndarray,
    size: tuple[int, int],
    box: tuple | None,
    near: Sequence[int],
    kernel: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Interpolates between the nearest pixels of each axis, without antialiasing.

    Pixels outside the image do not count. `weights.positions` cannot be used: its package imports
    Keras, and its matrices do not support a box.
    """
    left, top, right, bottom = box or (0, 0, image.shape[1], image.shape[0])
    result: Any = image.astype("float64")
    for axis, (start, end) in enumerate(((top, bottom), (left, right))):
        last = image.shape[axis] - 1
        place = start + (np.arange(size[axis]) + 0.5) * ((end - start) / size[axis]) - 0.5
        pixels = np.floor(place).astype(int) + np.array(near)[:, None]
        weights = np.where((pixels >= 0) & (pixels <= last), kernel(place - pixels), 0.0)
        weights = (weights / weights.sum(0)).reshape((-1, size[axis], *(1,) * (2 - axis)))
        taken = [result.take(i, axis) for i in np.clip(pixels, 0, last)]
        result = np.sum([x * weight for x, weight in zip(taken, weights, strict=True)], axis=0)
    if image.dtype == np.uint8:
        result = np.clip(np.round(result), 0, 255)
    return result.astype(image.dtype)


def middle(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns the largest center crop with the aspect ratio of `size`, like Keras."""
    (height, width), (down, across) = image.shape[:2], size
    rows = max(min(height, int(width * down / across)), 1)
    columns = max(min(width, int(height * across / down)), 1)
    top, left = (height - rows) // 2, (width - columns) // 2
    return image[top : top + rows, left : left + columns]


def _centered(
    image: np.ndarray, size: tuple[int, int], rounds: bool, fill: Sequence[int] = (0,)
) -> np.ndarray:
    """Returns the center crop of an image, padded if the image is smaller."""
    levels = np.asarray(fill).astype(image.dtype)
    for axis, wanted in enumerate(size):
        missing = wanted - image.shape[axis]
        if missing > 0:
            sides = [(0, 0)] * 3
            before = missing // 2 if rounds else -(-missing // 2)
            sides[axis] = (before, missing - before)
            bare = image.shape
            image = np.pad(image, sides)
            places = np.arange(image.shape[axis]) - before
            outside = (places < 0) | (places >= bare[axis])
            image[(slice(None),) * axis + (outside,)] = levels
        elif missing < 0:
            start = round(-missing / 2) if rounds else -missing // 2
            image = image.take(range(start, start + wanted), axis)
    return image
