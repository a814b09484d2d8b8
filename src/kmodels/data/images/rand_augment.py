"""RandAugment (Cubuk et al. 2019) on whole batches, with the operations of the paper.

Each operation runs once over all images that drew it, in NumPy, so that the result is the same
bit for bit with any version of Pillow.
"""

from collections.abc import Callable

import numpy as np

# (strength from 0 to 1, sign -1 or 1) for each image, and the images.
Operation = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def rand_augment(images: np.ndarray, drawn: np.ndarray, strength: float) -> np.ndarray:
    """Applies random operations.

    Args:
        images: uint8 or float32 (B, H, W, C), values from 0 to 255.
        drawn: (B, n, 2) in [0, 1): which operation, and its sign.
        strength: 0 to 10.

    Returns:
        Returns new images; they are uint8 in between.
    """
    result = np.clip(np.round(images), 0, 255).astype("uint8")
    for which, sign in drawn.transpose(1, 2, 0):
        numbers = (which * len(OPERATIONS)).astype(int)
        signs = np.where(sign < 0.5, -1.0, 1.0)
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            amount = np.full(len(rows), strength / 10)
            result[rows] = OPERATIONS[number](result[rows], amount, signs[rows])
    return result.astype(images.dtype)


def _identity(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return images


def _autocontrast(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    low = images.min((1, 2), keepdims=True).astype("float32")
    high = images.max((1, 2), keepdims=True).astype("float32")
    flat = high == low
    scale = np.where(flat, 1.0, 255.0 / np.where(flat, 1.0, high - low)).astype("float32")
    return _bytes((images - np.where(flat, 0.0, low)) * scale)


def _equalize(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
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


def _posterize(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    dropped = np.round(amount * 4).astype("uint8")
    mask = ((0xFF << dropped.astype(int)) & 0xFF).astype("uint8")
    return images & mask[:, None, None, None]


def _solarize(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    threshold = (256 - amount * 256)[:, None, None, None]
    return np.where(images >= threshold, 255 - images, images)


def _color(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    if images.shape[-1] == 1:
        return images
    return _blend(images, _luma(images), amount, sign)


def _contrast(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return _blend(images, np.round(_luma(images).mean((1, 2), keepdims=True)), amount, sign)


def _brightness(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    return _blend(images, np.zeros(1, "float32"), amount, sign)


def _sharpness(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    smooth = images.astype("float32")
    if min(images.shape[1:3]) > 2:
        total = 4 * smooth[:, 1:-1, 1:-1]
        for down in range(3):
            for right in range(3):
                height, width = images.shape[1] - 2, images.shape[2] - 2
                total = total + smooth[:, down : down + height, right : right + width]
        smooth[:, 1:-1, 1:-1] = total / 13
    return _blend(images, smooth, amount, sign)


def _rotate(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    angle = np.deg2rad(30.0 * amount * sign)
    cos, sin = np.cos(angle), np.sin(angle)
    return _affine(images, cos, -sin, sin, cos)


def _shear_x(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    one = np.ones_like(amount)
    return _affine(images, one, 0.3 * amount * sign, 0 * one, one)


def _shear_y(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    one = np.ones_like(amount)
    return _affine(images, one, 0 * one, 0.3 * amount * sign, one)


def _translate_x(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    one = np.ones_like(amount)
    right = np.round(0.45 * amount * sign * images.shape[2])
    return _affine(images, one, 0 * one, 0 * one, one, right=right)


def _translate_y(images: np.ndarray, amount: np.ndarray, sign: np.ndarray) -> np.ndarray:
    one = np.ones_like(amount)
    down = np.round(0.45 * amount * sign * images.shape[1])
    return _affine(images, one, 0 * one, 0 * one, one, down=down)


def _affine(
    images: np.ndarray,
    xx: np.ndarray,
    xy: np.ndarray,
    yx: np.ndarray,
    yy: np.ndarray,
    right: np.ndarray | float = 0.0,
    down: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Nearest neighbour about the centre; what comes from outside is black."""
    batch, height, width = images.shape[:3]
    y = (np.arange(height) - (height - 1) / 2)[None, :, None]
    x = (np.arange(width) - (width - 1) / 2)[None, None, :]
    xx, xy, yx, yy, right, down = (
        np.broadcast_to(value, (batch,))[:, None, None] for value in (xx, xy, yx, yy, right, down)
    )
    # Rounded to a millionth first: the last bits of a sine must not decide between two pixels.
    columns = np.rint(np.round(xx * x + xy * y + right + (width - 1) / 2, 6)).astype(int)
    rows = np.rint(np.round(yx * x + yy * y + down + (height - 1) / 2, 6)).astype(int)
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    taken = images[
        np.arange(batch)[:, None, None],
        np.clip(rows, 0, height - 1),
        np.clip(columns, 0, width - 1),
    ]
    return taken * inside[..., None].astype("uint8")


def _luma(images: np.ndarray) -> np.ndarray:
    if images.shape[-1] == 1:
        return images.astype("float32")
    # Like Pillow, this computes in whole numbers: a matrix product would round differently from
    # machine to machine.
    weighted = images.astype("int32") * np.array([19595, 38470, 7471], "int32")
    return ((weighted.sum(-1, keepdims=True) + 0x8000) >> 16).astype("float32")


def _blend(
    images: np.ndarray, other: np.ndarray, amount: np.ndarray, sign: np.ndarray
) -> np.ndarray:
    """Away from `other` by up to 0.9 times the difference, or towards it."""
    factor = (1.0 + 0.9 * amount * sign).astype("float32")[:, None, None, None]
    return _bytes(other + (images - other) * factor)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(np.round(values), 0, 255).astype("uint8")


OPERATIONS: tuple[Operation, ...] = (
    _identity,
    _autocontrast,
    _equalize,
    _rotate,
    _solarize,
    _color,
    _posterize,
    _contrast,
    _brightness,
    _sharpness,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
)
