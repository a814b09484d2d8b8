"""Synthetic images: random ones, scenes with masks, and numbers to read."""

import numpy as np

from kmodels.core.errors import InputError
from kmodels.data.rng import philox, uniforms


class SyntheticSource:
    """Random images (H, W, C) and labels, the same on every machine, made with their batch.

    `start` is the number of the first image, so that splits differ.
    """

    def __init__(
        self, count: int, shape: tuple[int, int, int], num_classes: int, seed: int, start: int = 0
    ):
        self.shape = shape
        self.seed = seed
        self.start = start
        numbers = np.arange(start, start + count)
        drawn = uniforms(seed, "synthetic-labels", 0, numbers, 1)[:, 0]
        self.labels = (drawn * num_classes).astype("int32")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See ImageSource."""
        size = int(np.prod(self.shape))
        words = -(-size // 8)
        images = np.empty((len(indices), *self.shape), "uint8")
        for row, number in enumerate(indices):
            raw = philox(self.seed, "synthetic-image", self.start + int(number)).random_raw(words)
            # Little-endian, so that the bytes are the same on every machine.
            images[row] = raw.astype("<u8").view("uint8")[:size].reshape(self.shape)
        return images, self.labels[indices]


SCENE_CLASSES = ("background", "disk", "square", "triangle", "ring")
SCENE_SIZE = (48, 48)
MOST_SHAPES = 3
SCENES = 2400


def number_of_scenes(spec: str) -> int:
    """Returns N of "scenes:N", at least 10, or the default of "scenes"."""
    _, _, rest = spec.partition(":")
    count = int(rest) if rest.isdigit() else SCENES
    if rest and (not rest.isdigit() or count < 10):
        raise InputError(f"data is {spec}; give scenes:N with N at least 10")
    return count


def made_scenes(
    count: int, size: tuple[int, int] = SCENE_SIZE, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws overlapping shapes with textures on a shaded background, with noise.

    Each kind of shape has its own texture (disks are striped, squares checked, triangles dotted,
    rings plain); colors, positions, sizes and angles are random.

    Args:
        count: number of scenes.
        size: (height, width) in pixels.
        seed: seed of all random numbers.

    Returns:
        uint8 (count, height, width, 3), and masks uint8 (count, height, width) with the numbers of
        `SCENE_CLASSES`.
    """
    images, masks, _ = _scenes(count, size, seed)
    return images, masks


def made_objects(
    count: int, size: tuple[int, int] = SCENE_SIZE, seed: int = 0
) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """Draws the scenes of `made_scenes`, with boxes around their shapes.

    Args:
        count: number of scenes.
        size: (height, width) in pixels.
        seed: seed of all random numbers.

    Returns:
        uint8 (count, height, width, 3), and for each scene "boxes", float32 (T, 4): center x and y,
        width and height as parts of the sides; and "class_labels", int32 (T,), a number of
        `SCENE_CLASSES` less one. A box is around the whole shape, also if another one covers it.
    """
    images, _, shapes = _scenes(count, size, seed)
    return images, shapes


def _scenes(
    count: int, size: tuple[int, int], seed: int
) -> tuple[np.ndarray, np.ndarray, list[dict[str, np.ndarray]]]:
    rng = np.random.Generator(philox(seed, "scenes"))
    height, width = size
    y, x = np.mgrid[:height, :width].astype("float32")
    images = np.empty((count, height, width, 3), "uint8")
    masks = np.zeros((count, height, width), "uint8")
    objects = []
    for image, mask in zip(images, masks, strict=True):
        boxes, kinds = [], []
        tilt = rng.uniform(-1, 1, 2)
        shade = 0.5 + 0.2 * (tilt[0] * (y / height - 0.5) + tilt[1] * (x / width - 0.5))
        canvas = shade[..., None] * rng.uniform(0.5, 1.5, 3)
        for _ in range(rng.integers(1, MOST_SHAPES + 1)):
            kind = int(rng.integers(1, len(SCENE_CLASSES)))
            radius = rng.uniform(0.18, 0.32) * min(size)
            center = [rng.uniform(0.6 * radius, side - 0.6 * radius) for side in size]
            angle = rng.uniform(0, 2 * np.pi)
            down, along = y - center[0], x - center[1]
            u = np.cos(angle) * along + np.sin(angle) * down
            v = np.cos(angle) * down - np.sin(angle) * along
            inside = _shape(kind, u, v, radius)
            light, dark = rng.uniform(0.6, 1.0, 3), rng.uniform(0.0, 0.35, 3)
            pattern = _texture(kind, u, v)[..., None]
            canvas = np.where(inside[..., None], pattern * light + (1 - pattern) * dark, canvas)
            mask[inside] = kind
            rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
            low = np.array([columns[0], rows[0]]) / (width, height)
            high = np.array([columns[-1] + 1, rows[-1] + 1]) / (width, height)
            boxes.append([*(low + high) / 2, *(high - low)])
            kinds.append(kind - 1)
        objects.append(
            {"boxes": np.array(boxes, "float32"), "class_labels": np.array(kinds, "int32")}
        )
        noisy = 255 * canvas + rng.normal(0.0, 6.0, canvas.shape)
        image[:] = np.clip(noisy, 0, 255).astype("uint8")
    return images, masks, objects


def _shape(kind: int, u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    """Returns the pixels of a shape around (0, 0)."""
    distance = np.hypot(u, v)
    if kind == 1:
        return distance < radius
    if kind == 2:
        return np.maximum(abs(u), abs(v)) < 0.85 * radius
    if kind == 3:
        # The intersection of three half planes.
        sides = [
            u * np.cos(turn) + v * np.sin(turn) for turn in (np.pi / 2, 7 * np.pi / 6, -np.pi / 6)
        ]
        return np.maximum.reduce(sides) < 0.6 * radius
    return (distance < radius) & (distance > 0.45 * radius)


def _texture(kind: int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns the brightness of each pixel of a shape, from 0 to 1."""
    if kind == 1:
        return (np.sin(u * 2.2) > 0).astype("float32")
    if kind == 2:
        return ((np.floor(u / 3) + np.floor(v / 3)) % 2).astype("float32")
    if kind == 3:
        return (np.hypot(u % 4 - 2, v % 4 - 2) < 1.2).astype("float32")
    return np.ones_like(u)


# Digits of a rendered number.
DIGITS = 3


def rendered_numbers(numbers: np.ndarray, rng: np.random.Generator, size: int = 32) -> np.ndarray:
    """Draws each number in light digits on a dark background, slightly displaced, with noise.

    Args:
        numbers: (N,) int, below 10 ** `DIGITS`; shorter ones get leading zeros.
        rng: draws size, position, brightness and noise.
        size: side of the images in pixels, at least 32.

    Returns:
        (N, size, size, 3) uint8.
    """
    from PIL import Image, ImageDraw, ImageFont

    fonts = [ImageFont.load_default(size=round(size * share)) for share in (0.47, 0.5)]
    canvases = np.zeros((len(numbers), size, size), "float32")
    for picture, number in zip(canvases, numbers, strict=True):
        text, font = f"{number:0{DIGITS}d}", fonts[rng.integers(len(fonts))]
        canvas = Image.new("L", (size, size), int(rng.integers(0, 80)))
        draw = ImageDraw.Draw(canvas)
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        x, y = (
            (size - span) // 2 + int(rng.integers(-2, 3)) - start
            for span, start in ((right - left, left), (bottom - top, top))
        )
        draw.text((x, y), text, fill=int(rng.integers(150, 256)), font=font)
        picture[:] = np.asarray(canvas)
    noisy = np.clip(canvases + rng.normal(0.0, 8.0, canvases.shape), 0, 255).astype("uint8")
    return np.repeat(noisy[..., None], 3, axis=-1)
