"""RandAugment (Cubuk et al. 2019) on whole batches, with timm's operations and magnitudes.

Each operation runs once over all images that drew it, in NumPy, so that the result is the same
bit for bit with any version of Pillow.

Source: timm 1.0, `timm.data.auto_augment`, the operations of "inc1", whose effect grows with the
magnitude, on Pillow's arithmetic.
"""

from collections.abc import Callable

import numpy as np

# uint8 images (B, H, W, C); the magnitude from 0 to 1; a sign -1 or 1 for each image; the colour of
# what comes from outside of an image, uint8, one value or one per channel.
Operation = Callable[[np.ndarray, float, np.ndarray, np.ndarray], np.ndarray]
# The probability with which each of the n operations is applied.
APPLIED = 0.5


def rand_augment(
    images: np.ndarray, drawn: np.ndarray, magnitude: float, fill: np.ndarray
) -> np.ndarray:
    """Applies random operations.

    Args:
        images: uint8 or float32 (B, H, W, C), values from 0 to 255.
        drawn: (B, n, 3) in [0, 1): which operation, its sign, and whether it is applied.
        magnitude: 0 to 10.
        fill: uint8 (1,) or (C,), the colour of what comes from outside of an image.

    Returns:
        Returns new images; they are uint8 in between.
    """
    result = np.clip(np.round(images), 0, 255).astype("uint8")
    for which, sign, applied in drawn.transpose(1, 2, 0):
        numbers = np.where(applied < APPLIED, (which * len(OPERATIONS)).astype(int), -1)
        signs = np.where(sign < 0.5, -1.0, 1.0)
        for number in np.unique(numbers[numbers >= 0]):
            rows = np.flatnonzero(numbers == number)
            result[rows] = OPERATIONS[number](result[rows], magnitude / 10, signs[rows], fill)
    return result.astype(images.dtype)


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


def _shear_x(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    return _affine(images, fill, (1.0, 0.3 * amount * sign, 0.0), (0.0, 1.0, 0.0))


def _shear_y(images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray) -> np.ndarray:
    return _affine(images, fill, (1.0, 0.0, 0.0), (0.3 * amount * sign, 1.0, 0.0))


def _translate_x(
    images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray
) -> np.ndarray:
    right = 0.45 * amount * sign * images.shape[2]
    return _affine(images, fill, (1.0, 0.0, right), (0.0, 1.0, 0.0))


def _translate_y(
    images: np.ndarray, amount: float, sign: np.ndarray, fill: np.ndarray
) -> np.ndarray:
    down = 0.45 * amount * sign * images.shape[1]
    return _affine(images, fill, (1.0, 0.0, 0.0), (0.0, 1.0, down))


Row = tuple[float | np.ndarray, float | np.ndarray, float | np.ndarray]


def _affine(images: np.ndarray, fill: np.ndarray, column: Row, row: Row) -> np.ndarray:
    """Returns each image with the nearest pixel from another place, from the top left corner.

    Args:
        images: uint8 (B, H, W, C).
        fill: the colour of what comes from outside.
        column: (a, b, c): the pixel at (x, y) comes from column a x + b y + c; a number or (B,)
            each.
        row: the same for its row.
    """
    batch, height, width = images.shape[:3]
    y, x = np.arange(height)[None, :, None], np.arange(width)[None, None, :]

    def place(numbers: Row) -> np.ndarray:
        a, b, c = (np.broadcast_to(value, batch)[:, None, None] for value in numbers)
        # Pillow's numbers of 16 bits behind the point: the last bits of a sine do not decide
        # between two pixels.
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
    # Like Pillow, this computes in whole numbers: a matrix product would round differently from
    # machine to machine.
    weighted = images.astype("int32") * np.array([19595, 38470, 7471], "int32")
    return ((weighted.sum(-1, keepdims=True) + 0x8000) >> 16).astype("float32")


def _blend(images: np.ndarray, other: np.ndarray, amount: float, sign: np.ndarray) -> np.ndarray:
    """Away from `other` by up to 0.9 times the difference, or towards it."""
    factor = (1.0 + 0.9 * amount * sign).astype("float32")[:, None, None, None]
    return _bytes(other + (images - other) * factor)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0, 255).astype("uint8")  # which cuts off, as Pillow does


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
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
)
