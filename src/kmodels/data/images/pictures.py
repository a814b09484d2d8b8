"""Image files to arrays, as a viewer would show them."""

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core.errors import InputError, one_line

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
# Pillow only warns at this size, and refuses at twice as much.
MAX_PIXELS = 89_478_485
MAX_BYTES = 1 << 28


class PictureError(InputError):
    """One image cannot be used; `reason` says why, without the name."""

    def __init__(self, name: str, reason: str):
        super().__init__(
            f"{name}: {reason}; repair or remove it, or leave such images out with skip_bad=True "
            "(--skip-bad in recipes)"
        )
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple:
        return PictureError, (self.name, self.reason)


def decode(content: bytes, name: str) -> np.ndarray:
    """Decodes a JPEG, PNG or WebP file.

    Turned as its EXIF orientation says. 16-bit grey is scaled down to 8 (not clipped, as Pillow's
    own conversion does), palettes are looked up, transparent parts lie on white, CMYK becomes RGB.

    Args:
        content: the file.
        name: for messages.

    Returns:
        uint8 (H, W, 3).

    Raises:
        PictureError: for a truncated or otherwise broken file, or one with over 89 million pixels.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise PictureError(name, _bomb(image.width, image.height))
            image.load()
            return upright(image)
    except PictureError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(
            name, f"over {MAX_PIXELS} pixels, refused as a decompression bomb"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(name, "not a JPEG, PNG or WebP image") from error
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError) as error:
        # Pillow raises all of these for damaged files, depending on the format.
        reason = one_line(error)
        raise PictureError(name, f"truncated or damaged ({reason})") from error


def upright(image: "Image.Image") -> np.ndarray:
    """Returns an image of Pillow, turned as its EXIF orientation says, as uint8 (H, W, 3)."""
    from PIL import ImageOps

    return np.asarray(_as_rgb(ImageOps.exif_transpose(image)))


def _bomb(width: int, height: int) -> str:
    return f"{width}x{height} is over {MAX_PIXELS} pixels, refused as a decompression bomb"


def _as_rgb(image: "Image.Image") -> Any:
    from PIL import Image

    if image.mode.startswith("I"):
        # "I;16" and its byte orders hold 16 bits, and "I" in a PNG does too.
        grey = np.asarray(image).astype("float64") * (255 / 65535)
        image = Image.fromarray(np.clip(np.round(grey), 0, 255).astype("uint8"))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def with_channels(pictures: np.ndarray, channels: int) -> np.ndarray:
    """Grey to RGB by repeating, RGB to grey by ITU-R 601 luma as Pillow; (..., C) in and out."""
    have = pictures.shape[-1]
    if have == channels:
        return pictures
    if have == 1:
        return np.repeat(pictures, channels, axis=-1)
    if have == 3 and channels == 1:
        # Term by term: a matrix product rounds differently from machine to machine.
        red, green, blue = (pictures[..., i].astype("float32") for i in range(3))
        luma = red * np.float32(0.299) + green * np.float32(0.587) + blue * np.float32(0.114)
        luma = np.round(luma) if pictures.dtype == np.uint8 else luma
        return luma[..., None].astype(pictures.dtype)
    raise InputError(f"images have {have} channels but {channels} are wanted; give 1 or 3")
