"""Maps drawn over images."""

import numpy as np
from numpy.typing import ArrayLike

from kmodels.core.errors import InputError

# From little to much, black over violet and orange to yellow: Matplotlib's "inferno", eight steps.
COLORS = (
    *((0, 0, 4), (40, 11, 84), (101, 21, 110), (159, 42, 99)),
    *((212, 72, 66), (245, 125, 21), (250, 193, 39), (252, 255, 164)),
)


def overlay(image: ArrayLike, map: ArrayLike, alpha: float = 0.6) -> np.ndarray:
    """Returns an image with a map over it.

    Args:
        image: uint8 or floats (height, width, C) or (height, width), or a batch of them
            (B, height, width, C); C is 1 or 3. Floats are stretched from their least to their
            largest value, so that normalised images do too.
        map: (rows, columns), or (B, rows, columns); stretched likewise, and made as large as the
            image by bilinear interpolation.
        alpha: share of the map in the mixture; 1 shows the map alone.

    Returns:
        uint8 (height, width, 3), or (B, height, width, 3): `PIL.Image.fromarray` takes it.

    Raises:
        InputError: for shapes that do not fit, or a share out of range.
    """
    picture, values = np.asarray(image), np.asarray(map, "float64")
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is {alpha}; give a share in [0, 1]")
    if picture.ndim == 4 and values.ndim == 3 and len(picture) == len(values):
        return np.stack([overlay(x, y, alpha) for x, y in zip(picture, values, strict=True)])
    if picture.ndim == 2:
        picture = picture[..., None]
    if picture.ndim != 3 or picture.shape[-1] not in (1, 3) or values.ndim != 2:
        raise InputError(
            f"the image has the shape {np.shape(image)} and the map {values.shape}; give "
            "(height, width, 1 or 3) and (rows, columns), or batches of both"
        )
    height, width = picture.shape[:2]
    if picture.dtype != np.uint8:
        picture = _stretched(picture.astype("float64")) * 255
    large = _line(_line(_stretched(values), height).T, width).T
    places = np.linspace(0, 1, len(COLORS))
    colors = np.stack([np.interp(large, places, channel) for channel in np.transpose(COLORS)], -1)
    return np.round((1 - alpha) * picture + alpha * colors).astype("uint8")


def _stretched(x: np.ndarray) -> np.ndarray:
    reach = x.max() - x.min()
    return (x - x.min()) / reach if reach else np.zeros_like(x)


def _line(x: np.ndarray, length: int) -> np.ndarray:
    """Returns rows interpolated to another number, between the centers of the old ones."""
    at = np.clip((np.arange(length) + 0.5) * len(x) / length - 0.5, 0, len(x) - 1)
    below = np.floor(at).astype(int)
    share = (at - below)[:, None]
    return x[below] * (1 - share) + x[np.minimum(below + 1, len(x) - 1)] * share
