"""Pictures in another size: as Pillow makes them, or without smoothing, as some models want."""

from dataclasses import dataclass

import numpy as np

from kmodels.core.errors import InputError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Resizing:
    """Resizing of pictures to the size that a model takes.

    Args:
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
        antialias: smooths what is made smaller, as Pillow does; False with "nearest" and "bilinear"
            alone.
        crop_to_aspect_ratio: takes the largest middle part of the wanted shape, instead of
            stretching the picture.

    Raises:
        InputError: for another interpolation, or one that is not done without smoothing.
    """

    interpolation: str = "bilinear"
    antialias: bool = True
    crop_to_aspect_ratio: bool = False

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise InputError(
                f"interpolation is {self.interpolation!r}; choose one of "
                f"{', '.join(INTERPOLATIONS)}"
            )
        if not self.antialias and self.interpolation not in ("nearest", "bilinear"):
            raise InputError(
                f"antialias=False with interpolation={self.interpolation!r} differs from framework "
                "to framework; give antialias=True, or interpolation='bilinear'"
            )

    def __call__(
        self, picture: np.ndarray, size: tuple[int, int], box: tuple | None = None
    ) -> np.ndarray:
        """Returns a picture, or the part of it that `box` names, in another size; see `resize`."""
        if box is None and self.crop_to_aspect_ratio:
            picture = middle(picture, size)
        return resize(picture, size, box, self.interpolation, self.antialias)


USUAL = Resizing()


def resize(
    picture: np.ndarray,
    size: tuple[int, int],
    box: tuple | None = None,
    interpolation: str = "bilinear",
    antialias: bool = True,
) -> np.ndarray:
    """Returns a picture in another size.

    Args:
        picture: uint8 or float32 (H, W, C).
        size: (height, width) wanted.
        box: part of the picture to take, (left, top, right, bottom) in pixels, fractions allowed.
        interpolation: of `Resizing`.
        antialias: of `Resizing`.

    Returns:
        (height, width, C) of the picture's dtype.
    """
    from PIL import Image

    if box is None and picture.shape[:2] == tuple(size):
        return picture
    if not antialias and interpolation == "bilinear":
        return _between_two(picture, size, box)
    target, method = (size[1], size[0]), Image.Resampling[interpolation.upper()]
    if picture.dtype == np.uint8 and picture.shape[-1] in (1, 3):
        image = Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture)
        return np.asarray(image.resize(target, method, box=box)).reshape(*size, -1)
    planes = [
        Image.fromarray(np.ascontiguousarray(plane, "float32")).resize(target, method, box=box)
        for plane in np.moveaxis(picture, -1, 0)
    ]
    return np.stack([np.asarray(plane) for plane in planes], -1).astype(picture.dtype)


def _between_two(picture: np.ndarray, size: tuple[int, int], box: tuple | None) -> np.ndarray:
    """Takes the two nearest pixels of each axis, bilinearly, however far apart they are taken.

    Workers import no Keras, as `weights.positions` does, whose matrices know no box either.
    """
    left, top, right, bottom = box or (0, 0, picture.shape[1], picture.shape[0])
    result = picture.astype("float64")
    for axis, (start, end) in enumerate(((top, bottom), (left, right))):
        last = picture.shape[axis] - 1
        place = start + (np.arange(size[axis]) + 0.5) * ((end - start) / size[axis]) - 0.5
        place = np.clip(place, 0, last)
        low = np.floor(place).astype(int)
        share = (place - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        one, other = (result.take(i, axis) for i in (low, np.minimum(low + 1, last)))
        result = one + (other - one) * share
    return (np.round(result) if picture.dtype == np.uint8 else result).astype(picture.dtype)


def middle(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns the largest centre crop with the aspect ratio of `size`, as Keras cuts it."""
    (height, width), (down, across) = picture.shape[:2], size
    rows = max(min(height, int(width * down / across)), 1)
    columns = max(min(width, int(height * across / down)), 1)
    top, left = (height - rows) // 2, (width - columns) // 2
    return picture[top : top + rows, left : left + columns]
