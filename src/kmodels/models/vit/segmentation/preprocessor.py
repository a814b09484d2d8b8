"""Preprocessor of segmenters: images with masks, also padded or cut into windows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.data.images.decoding import is_pillow
from kmodels.data.images.resizing import resize, with_shorter_side
from kmodels.data.images.sources import NO_LABEL, check_whole_classes
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.models.blocks.preprocessing import ImageSegmenterPreprocessor
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.preprocessor import (
    OF_MASKS,
    ViTImageClassifierPreprocessor,
    ViTImageConverter,
)
from kmodels.models.vit.segmentation.masks import classes
from kmodels.training.set_criterion import KEYS, parts_of

# What is done with an image; the first is the default.
WAYS = ("stretch", "pad", "split", "slide", "none")
# Those that cut an image into windows, and those that keep its shape.
WINDOWED = ("split", "slide")
FRAMED = ("pad", *WINDOWED)


def fitted(size: Sequence[int], side: int, way: str) -> tuple[int, int]:
    """Returns the size of an image before it is padded or cut.

    Args:
        size: (height, width) of the image.
        side: of the model's square images.
        way: "pad" to resize the longer side to `side`, or "split" or "slide" to resize the shorter
            one.
    """
    height, width = size
    if way == "slide":  # rounded as in DINOv3's code
        return with_shorter_side(size, side)
    short = float(side)
    if way == "pad" and height != width:
        short = side * float(min(height, width)) / float(max(height, width))
    shorter = round(short)
    # Whole numbers as transformers cuts them, which may be one pixel short of `side`.
    if (height <= width and height == shorter) or (width <= height and width == shorter):
        return height, width
    if width < height:
        return int(short * height / width), shorter
    return shorter, int(short * width / height)


def window_starts(length: int, side: int, way: str) -> list[int]:
    """Returns the starts of windows that cover a length.

    Args:
        length: longer side of the resized image.
        side: of the windows.
        way: "split" for windows that overlap evenly, or "slide" for steps of two thirds of a
            window, of which the last is shorter.
    """
    if way == "slide":
        step = max(2 * side // 3, 1)
        return [min(start, length - side) for start in range(0, max(length - side, 0) + step, step)]
    number = math.ceil(length / side)
    overlap = (number * side - length) / (number - 1) if number > 1 else 0
    return [int(i * (side - overlap)) for i in range(number)]


def windows(image: np.ndarray, side: int, way: str) -> list[np.ndarray]:
    """Returns the square windows of an image (height, width, C), whose shorter side is theirs."""
    height, width = image.shape[:2]
    starts = window_starts(max(height, width), side, way)
    if height > width:
        return [image[start : start + side] for start in starts]
    return [image[:, start : start + side] for start in starts]


def of_images(
    scores: Iterable[np.ndarray], sizes: Iterable[Sequence[int]], side: int, way: str
) -> list[np.ndarray]:
    """Returns the class of each pixel of images that were padded or cut.

    Args:
        scores: (side, side, K) of each of the model's images, asked for one after the other.
        sizes: (height, width) of each image.
        side: of the model's images.
        way: "pad", "split" or "slide".

    Returns:
        int32 (height, width) of each image.
    """
    scores, results = iter(scores), []
    for size in sizes:
        height, width = fitted(size, side, way)
        if way == "pad":
            results.append(classes(next(scores)[:height, :width], size))
        else:
            parts = islice(scores, len(window_starts(max(height, width), side, way)))
            results.append(_merged(parts, side, size, way))
    return results


def _merged(scores: Iterable[np.ndarray], side: int, size: Sequence[int], way: str) -> np.ndarray:
    """Returns the class of each pixel by the mean scores of the windows of an image."""
    tall = size[0] > size[1]
    whole = fitted(size, side, way)
    count = np.zeros((*whole, 1), "float32")
    total: np.ndarray = count
    for start, one in zip(window_starts(max(whole), side, way), scores, strict=True):
        if total is count:
            total = np.zeros((*whole, one.shape[-1]), "float32")
        part = np.s_[start : start + side] if tall else np.s_[:, start : start + side]
        total[part] += one
        count[part] += 1
    return classes(total / count, size)


def padded(
    y: Mapping[str, Any] | Sequence[Mapping[str, Any]], resize: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Any]:
    """Returns masks and classes of all images, as many for each.

    Args:
        y: "mask_labels", for each image (T, H, W), and "class_labels", for each image (T,); or a
            list of such dictionaries.
        resize: makes a mask (H, W) the model's size.

    Returns:
        "mask_labels", uint8 (B, S, height, width), and "class_labels", int32 (B, S), -1 for no
        segment. S is a power of two, so that few steps are compiled.

    Raises:
        InputError: for other keys, numbers that differ, or classes that are not whole numbers.
    """
    if not isinstance(y, Mapping):
        y = dict(zip(KEYS, zip(*map(parts_of, y), strict=True), strict=True))
    masks, classes = ([to_numpy(one) for one in part] for part in parts_of(y))
    numbers = [len(one) for one in masks]
    if numbers != [len(one) for one in classes]:
        raise InputError(
            f"images have {numbers} masks and {[len(one) for one in classes]} classes; give a "
            "class for each mask"
        )
    room = 1 << (max([1, *numbers]) - 1).bit_length()
    kinds = np.full((len(masks), room), -1, "int32")
    rows: list[np.ndarray] = []
    for number, (row, masks_of_row, own) in enumerate(zip(kinds, masks, classes, strict=True)):
        check_whole_classes(own, f"image {number}")
        row[: len(own)] = own
        rows.append(np.array([resize(mask) for mask in masks_of_row], "uint8"))
    shape = next((one.shape[1:] for one in rows if len(one)), resize(np.zeros((1, 1), int)).shape)
    whole = np.zeros((len(masks), room, *shape), "uint8")
    for into, one in zip(whole, rows, strict=True):
        if len(one):
            into[: len(one)] = one
    return dict(zip(KEYS, (whole, kinds), strict=True))


def _check_sides(images: Any, masks: Any) -> None:
    """Raises `InputError` for a mask that is not turned as its image, which EXIF may turn."""
    from PIL import ImageOps

    for number, (image, mask) in enumerate(zip(images, masks, strict=False)):
        shown: Any = ImageOps.exif_transpose(image) if is_pillow(image) else image
        sides = shown.size[::-1] if is_pillow(image) else np.shape(shown)[:2]
        if not isinstance(mask, Mapping) and sides != sides[::-1] == np.shape(mask)[:2]:
            raise InputError(
                f"image {number} has {sides[1]}x{sides[0]} pixels and its mask "
                f"{sides[0]}x{sides[1]}; turn the mask, too"
            )


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageSegmenterPreprocessor(ImageSegmenterPreprocessor, ViTImageClassifierPreprocessor):
    """`ViTImageClassifierPreprocessor` for images whose labels are masks.

    Images are never cropped, so that each pixel of a mask belongs to one of its image.

    Args:
        image_size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        interpolation: as in `ViTImageClassifierPreprocessor`.
        antialias: as in `ViTImageClassifierPreprocessor`.
        resize_output_mask: resizes masks to `image_size` by the nearest pixel; False if they
            already have that size. keras-hub's default is False.
        aspect_ratio: "stretch" resizes every image to the model's shape. "pad" keeps the aspect
            ratio and pads with black at the right or bottom, masks with label 255. "split" resizes
            the shorter side and cuts the image into windows that overlap evenly, "slide" into
            windows at steps of two thirds of one (the usual sliding-window evaluation); both are
            for `segment` only, and return more images than were given. All three need a square
            image_size.
            "none" refuses images of another size.
        image_converter: a `ViTImageConverter`, or keras-hub's; all of the above except for
            `resize_output_mask` is read from it.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        x: as of `ViTImageClassifierPreprocessor`.
        y: masks of whole numbers, (B, H, W) or (B, H, W, 1), one (H, W), or a list of any sizes; or
            segments, a dictionary of "mask_labels", for each image (T, H, W), and "class_labels",
            for each image (T,), or a list of such dictionaries.
        sample_weight: handed through.
        -> float32 images (B, height, width, C), and with y int32 masks (B, height, width).

    Raises:
        InputError: for invalid masks, a converter that crops, another aspect_ratio, or masks
            with windows.
    """

    may_crop = False

    def __init__(
        self,
        image_size: Sequence[int] = (224, 224),
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bilinear",
        antialias: bool = True,
        resize_output_mask: bool = True,
        aspect_ratio: str = "stretch",
        *,
        image_converter: ViTImageConverter | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            *(image_size, mean, std, interpolation, antialias),
            resize_mode="none" if aspect_ratio == "none" else "stretch",
            image_converter=image_converter,
            **kwargs,
        )
        self.resize_output_mask = resize_output_mask
        self.aspect_ratio = aspect_ratio
        if aspect_ratio not in WAYS:
            raise InputError(f"aspect_ratio is {aspect_ratio!r}; choose {' or '.join(WAYS)}")
        height, width = self.image_size
        if aspect_ratio in FRAMED and height != width:
            raise InputError(
                f"aspect_ratio is {aspect_ratio!r} and image_size {self.image_size}; give a square "
                "one, or aspect_ratio='stretch'"
            )

    @property
    def image_converter(self) -> ViTImageConverter:
        """The same as a layer with keras-hub's arguments, which stretches.

        Raises:
            InputError: if images keep their aspect ratio.
        """
        if self.aspect_ratio != "stretch":
            raise InputError(
                f"an image converter has no counterpart for aspect_ratio={self.aspect_ratio!r}; "
                "give 'stretch'"
            )
        return super().image_converter

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns normalised images, and masks of their size."""
        if self.aspect_ratio in WINDOWED and (y is not None or sample_weight is not None):
            raise InputError(
                f"aspect_ratio={self.aspect_ratio!r} makes several images of one, which have no "
                "masks; train with 'pad' or 'stretch'"
            )
        if y is not None and not isinstance(y, Mapping):
            _check_sides(x, y)
        if self.aspect_ratio in FRAMED:
            x = self._framed(x)
        return super().call(x, None if y is None else self._masks(y), sample_weight)

    def fitted_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Returns the (height, width) of an image before it is padded or cut."""
        return fitted(size, self.image_size[0], self.aspect_ratio)

    def _framed(self, x: Data) -> Any:
        """Returns padded images or windows, all of the model's size."""
        listed = isinstance(x, list | tuple)
        images: Any = x if listed else to_numpy(x)
        single = not listed and images.ndim == 3
        framed: list[np.ndarray] = []
        for one in [images] if single else images:
            image: np.ndarray = to_numpy(one)
            image = self.resizing(image, self.fitted_size(image.shape[:2]))
            if self.aspect_ratio in WINDOWED:
                framed += windows(image, self.image_size[0], self.aspect_ratio)
            else:
                framed.append(self._padded(image, 0))
        if single and self.aspect_ratio == "pad":
            return framed[0]
        return framed if listed else np.stack(framed) if framed else images

    def _padded(self, image: np.ndarray, value: int) -> np.ndarray:
        height, width = image.shape[:2]
        below, right = self.image_size[0] - height, self.image_size[1] - width
        return np.pad(image, ((0, below), (0, right), (0, 0)), constant_values=value)

    def _masks(self, y: Data) -> Any:
        listed = isinstance(y, list | tuple)
        masks: Any = y if listed or isinstance(y, Mapping) else to_numpy(y)
        if isinstance(masks, Mapping) or any(isinstance(one, Mapping) for one in masks):
            return padded(masks, partial(self._mask, outside=0))
        if not listed and masks.ndim == 2:
            return self._mask(masks)
        if len(masks) == 0:
            return np.zeros((0, *self.image_size), "int32")
        return np.stack([self._mask(to_numpy(one)) for one in masks])

    def _mask(self, mask: np.ndarray, outside: int = NO_LABEL) -> np.ndarray:
        if mask.ndim == 3 and mask.shape[-1] == 1:
            mask = mask[..., 0]
        if mask.ndim != 2:
            raise InputError(f"a mask has shape {mask.shape}; give (height, width)")
        if not np.issubdtype(mask.dtype, np.integer) and not np.array_equal(mask, np.rint(mask)):
            raise InputError(f"a mask has values of {mask.dtype}; give whole numbers of classes")
        if self.resize_output_mask:
            # Whole numbers up to 2 ** 24 are themselves in float32.
            pads = self.aspect_ratio == "pad"
            height, width = self.fitted_size(mask.shape) if pads else self.image_size
            numbers = mask[..., None].astype("float32")
            resized = resize(numbers, (height, width), None, "nearest")
            mask = (self._padded(resized, outside) if pads else resized)[..., 0]
        return mask.astype("int32")

    def compute_output_spec(
        self, x: keras.KerasTensor, y: keras.KerasTensor | None = None, sample_weight: Data = None
    ) -> Any:
        """Returns shapes and dtypes that `call` gives."""
        if y is not None:
            shape = tuple(y.shape)
            if len(shape) > 2 and shape[-1] == 1:
                shape = shape[:-1]
            size = self.image_size if self.resize_output_mask else shape[-2:]
            y = keras.KerasTensor((*shape[:-2], *size), "int32")
        if self.aspect_ratio in WINDOWED:  # of any number of windows
            x = keras.KerasTensor((None, *x.shape[-3:]), x.dtype)
        return super().compute_output_spec(x, y, sample_weight)

    @classmethod
    def fitted(cls, arguments: dict[str, Any], config: ViTConfig) -> dict[str, Any]:
        """Returns a checkpoint's arguments; see `Preprocessor`."""
        own = {name: arguments[name] for name in OF_MASKS if name in arguments}
        if arguments.get("resize_mode") == "none":
            own["aspect_ratio"] = "none"
        return {**super().fitted(arguments, config), **own}

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in OF_MASKS}}
