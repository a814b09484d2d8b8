"""An image in the size that fits a number of patches, and its patches as rows.

The size is the one of transformers' SigLIP 2 processor: the largest at which the image keeps its
aspect ratio, up to whole patches, and has no more than so many of them.
"""

import math
from collections.abc import Sequence

import numpy as np

from kmodels.core.errors import InputError, check_whole

# The search of transformers' processor: where it begins, and how near it comes to the best scale.
CLOSE, LOWEST, HIGHEST = 1e-5, 1e-6, 100.0


def grid_of(
    height: int, width: int, patch_size: int, max_num_patches: int, enlarge: bool = True
) -> tuple[int, int]:
    """Returns rows and columns of patches that an image becomes.

    Args:
        height: height of the image in pixels.
        width: its width.
        patch_size: side of a patch in pixels.
        max_num_patches: patches that it may have at most.
        enlarge: makes small images larger, so that all come close to `max_num_patches`.

    Raises:
        InputError: for numbers below 1.
    """
    for name, value in (("height", height), ("width", width), ("patch_size", patch_size)):
        check_whole(name, value)
    check_whole("max_num_patches", max_num_patches)

    def scaled(scale: float) -> tuple[int, int]:
        # As transformers, whose patches are rounded up: the last ones are not cut, but squeezed.
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
    # An image of many times the other side has at least one patch across, so too many along.
    return min(rows, max_num_patches), min(columns, max_num_patches)


def normalized(image: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns pixels in [0, 255] as float32, divided by 255 and normalised as transformers does."""
    pixels = (image.astype("float64") * (1 / 255)).astype("float32")
    return (pixels - np.asarray(mean, "float32")) / np.asarray(std, "float32")


def patches_of(image: np.ndarray, patch_size: int) -> np.ndarray:
    """Returns the patches of an image, row by row: (H, W, C) -> (P, patch * patch * C).

    The numbers of a patch are in the order (row, column, channel).
    """
    rows, columns = (side // patch_size for side in image.shape[:2])
    x = image.reshape(rows, patch_size, columns, patch_size, image.shape[-1])
    return x.transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)


def padded(
    images: Sequence[np.ndarray], grids: Sequence[tuple[int, int]], length: int
) -> dict[str, np.ndarray]:
    """Returns one row for each image, filled with zeros.

    Args:
        images: patches of each image, (P, patch * patch * C).
        grids: rows and columns of each.
        length: patches of a row.

    Returns:
        "pixel_values" (B, length, patch * patch * C) float32, "pixel_attention_mask" (B, length)
        int32, 1 where there is a patch, and "spatial_shapes" (B, 2) int32.

    Raises:
        InputError: without images.
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
