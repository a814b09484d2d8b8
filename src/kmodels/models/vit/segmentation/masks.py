"""Masks of any size from the logits of patches, in NumPy: no size has to be compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.data.images.decoding import is_picture
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.weights.positions import resize_matrix

# Number of logits that are computed at a time.
_MOST_NUMBERS = 1 << 24


def resized(grid: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Returns maps in another size, bilinear between the centers of their pixels.

    Args:
        grid: (rows, columns, K).
        size: (height, width) wanted.

    Returns:
        float32 (height, width, K).
    """
    down, across = _matrices(grid, size)
    return np.einsum("hr,rck,wc->hwk", down, grid, across, optimize=True)


def classes(grid: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Returns the class with the largest logit of each pixel, band by band.

    Args:
        grid: logits (rows, columns, classes).
        size: (height, width) of the image.

    Returns:
        int32 (height, width).
    """
    height, width = size
    down, across = _matrices(grid, size)
    wide = np.einsum("rck,wc->rwk", grid, across, optimize=True)
    step = max(1, _MOST_NUMBERS // (width * grid.shape[-1]))
    numbers = np.empty((height, width), "int32")
    for start in range(0, height, step):
        band = np.tensordot(down[start : start + step], wide, 1)
        numbers[start : start + step] = band.argmax(-1)
    return numbers


def of_each(
    images: Data, process: Callable[[Any, list[Any]], list[Any]], stack: bool = False
) -> Any:
    """Returns the result for each image, in the form in which the images were given.

    Args:
        images: (B, H, W, C), one image (H, W, C), or a list of images of any size, of Pillow or
            paths of files.
        process: makes a list of images, at least one, and of their (height, width).
        stack: stacks masks (H, W) to one array if the images are one array.

    Returns:
        A list; of one image (H, W, C) its result alone.

    Raises:
        InputError: for an array of another shape.
    """
    listed = isinstance(images, list | tuple)
    batch: Any = images
    if listed:
        batch = [open_picture(image) if is_picture(image) else image for image in batch]
    elif is_picture(images) or hasattr(images, "__array__"):
        batch = open_picture(images) if is_picture(images) else to_numpy(images)
    if not listed and getattr(batch, "ndim", 0) not in (3, 4):
        kind = (
            f"have shape {batch.shape}"
            if hasattr(batch, "shape")
            else f"are a {type(batch).__name__}"
        )
        raise InputError(f"images {kind}; give (B, H, W, C), one (H, W, C), or a list")
    single = not listed and batch.ndim == 3
    if single:
        batch = batch[None]
    sizes = [np.shape(image)[:2] for image in batch]
    if wrong := [size for size in sizes if len(size) != 2 or not all(size)]:
        raise InputError(f"an image has shape {wrong[0]}; give (height, width, C), each at least 1")
    results = process(batch, sizes) if sizes else []
    if single:
        return results[0]
    if listed or not stack:
        return results
    return np.stack(results) if results else np.zeros(batch.shape[:3], "int32")


def _matrices(grid: np.ndarray, size: Sequence[int]) -> list[np.ndarray]:
    return [
        resize_matrix(old, new, "bilinear").astype("float32")
        for old, new in zip(grid.shape[:2], size, strict=True)
    ]
