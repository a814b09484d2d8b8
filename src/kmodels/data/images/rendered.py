"""Images of numbers, for demonstrations of models that read."""

import numpy as np

# Number of digits, and side of the square images in pixels.
DIGITS, SIZE = 3, 32


def rendered_numbers(numbers: np.ndarray, rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """Draws each number in light digits on a dark ground, somewhat displaced, with noise.

    Args:
        numbers: (N,) int, below 10 ** `DIGITS`; those with fewer digits get zeros in front.
        rng: draws size, place, grey and noise.
        size: side of the images in pixels, from 32 on.

    Returns:
        (N, size, size, 3) uint8.
    """
    from PIL import Image, ImageDraw, ImageFont

    fonts = [ImageFont.load_default(size=round(size * share)) for share in (0.47, 0.5)]
    found = np.zeros((len(numbers), size, size), "float32")
    for picture, number in zip(found, numbers, strict=True):
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
    noisy = np.clip(found + rng.normal(0.0, 8.0, found.shape), 0, 255).astype("uint8")
    return np.repeat(noisy[..., None], 3, axis=-1)
