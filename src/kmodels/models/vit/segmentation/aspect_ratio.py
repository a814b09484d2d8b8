"""Images of other shapes than the model's: stretched, padded, or cut into windows.

Sizes, windows and their sums are those of transformers' `EomtImageProcessorPil`.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kmodels.models.vit.segmentation.masks import classes

# What is done with an image; the first is the default.
WAYS = ("stretch", "pad", "split")


def fitted(size: Sequence[int], side: int, way: str) -> tuple[int, int]:
    """Returns the size that an image gets before it is padded or cut.

    Args:
        size: (height, width) of the image.
        side: of the model's square images.
        way: "pad", where the longer side becomes `side`, or "split", where the shorter one does.
    """
    height, width = size
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


def window_starts(length: int, side: int) -> list[int]:
    """Returns where windows of a side begin that cover a length and overlap evenly."""
    number = math.ceil(length / side)
    overlap = (number * side - length) / (number - 1) if number > 1 else 0
    return [int(i * (side - overlap)) for i in range(number)]


def windows(image: np.ndarray, side: int) -> list[np.ndarray]:
    """Returns the square windows of an image whose shorter side is that of a window.

    Args:
        image: (height, width, C).
        side: of the windows.
    """
    height, width = image.shape[:2]
    starts = window_starts(max(height, width), side)
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
        way: "pad" or "split".

    Returns:
        int32 (height, width) of each image.
    """
    scores, found = iter(scores), []
    for size in sizes:
        height, width = fitted(size, side, way)
        if way == "pad":
            found.append(classes(next(scores)[:height, :width], size))
        else:
            parts = islice(scores, len(window_starts(max(height, width), side)))
            found.append(_merged(parts, side, size))
    return found


def _merged(scores: Iterable[np.ndarray], side: int, size: Sequence[int]) -> np.ndarray:
    """Returns the class of each pixel by the mean scores of the windows of an image."""
    tall = size[0] > size[1]
    whole = fitted(size, side, "split")
    count = np.zeros((*whole, 1), "float32")
    total: np.ndarray = count
    for start, one in zip(window_starts(max(whole), side), scores, strict=True):
        if total is count:
            total = np.zeros((*whole, one.shape[-1]), "float32")
        part = np.s_[start : start + side] if tall else np.s_[:, start : start + side]
        total[part] += one
        count[part] += 1
    return classes(total / count, size)
