"""Image files decoded to arrays, as a viewer would show them."""

import functools
import io
import stat
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from kmodels.core.errors import InputError, one_line

if TYPE_CHECKING:
    from PIL import Image

# Formats whose pixels Pillow cannot read, or only with another program.
_WITHOUT_PIXELS = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
# Pillow only warns at this size, and refuses at twice as much.
MAX_PIXELS = 89_478_485
MAX_BYTES = 1 << 28


class PictureError(InputError):
    """An image that cannot be used; `reason` is the message without the name."""

    def __init__(self, name: str, reason: str):
        super().__init__(
            f"{name}: {reason}; repair or remove it, or leave such images out with skip_bad=True "
            "(--skip-bad in recipes)"
        )
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple:
        return PictureError, (self.name, self.reason)


@functools.cache
def formats() -> tuple[str, ...]:
    """Returns the names of the formats that Pillow can read, with pillow-heif if installed."""
    from PIL import Image

    if find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()
    Image.init()
    return tuple(sorted(set(Image.OPEN) - _WITHOUT_PIXELS))


@functools.cache
def suffixes() -> tuple[str, ...]:
    """Returns the extensions of image files that Pillow can read, such as ".jpg"."""
    from PIL import Image

    known = {*formats(), "MPO"}  # Pillow opens it as JPEG
    return tuple(
        sorted(end for end, kind in Image.registered_extensions().items() if kind in known)
    )


def read_picture(file: Path) -> bytes:
    """Returns the content of the file of an image.

    Raises `PictureError` for a device or a pipe, which may have no end, or a file that is too
    large.
    """
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
        raise PictureError(str(file), "not a regular file")
    if facts.st_size > MAX_BYTES:
        raise PictureError(str(file), f"over {MAX_BYTES} bytes")
    return file.read_bytes()


def decode_file(file: Path) -> np.ndarray:
    """Returns the image (H, W, 3) in a file, see `read_picture` and `decode`."""
    return decode(read_picture(file), str(file))


def decode(content: bytes, name: str) -> np.ndarray:
    """Decodes an image file of any format that Pillow reads to uint8 (H, W, 3).

    Of an animation the first frame is used. The EXIF orientation is applied. 16-bit grey is scaled
    to 8 bits (Pillow's own conversion clips), palettes are looked up, transparent parts become
    white, and CMYK becomes RGB. Floats are rounded; they must be from 0 to 255.

    Raises:
        PictureError: for a truncated or otherwise broken file, or one with over 89 million pixels.
    """
    return read_pixels(content, name, formats(), lambda image: upright(image, name))


def read_pixels(
    content: bytes, name: str, kinds: tuple[str, ...], take: "Callable[[Image.Image], np.ndarray]"
) -> np.ndarray:
    """Returns the pixels that `take` makes of an image file of some formats; see `decode`."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=kinds) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width}x{image.height}"
                raise PictureError(
                    name, f"{size} is over {MAX_PIXELS} pixels, refused as a decompression bomb"
                )
            _tell_of_frames(image, name)
            image.load()
            return take(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(
            name, f"over {MAX_PIXELS} pixels, refused as a decompression bomb"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise PictureError(name, "not an image that Pillow reads") from error
    except (PictureError, Warning):
        raise
    except Exception as error:  # of nearly any kind, depending on the format
        raise PictureError(name, f"truncated or damaged ({one_line(error)})") from error


def is_turned(content: bytes) -> bool:
    """Returns True if an image file has an EXIF orientation that turns or mirrors it."""
    from PIL import ExifTags, Image

    with Image.open(io.BytesIO(content), formats=formats()) as image:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)


def tell_of_orientation(name: str, labels: str) -> None:
    """Warns once of an image that EXIF turns, whose labels may be of the image as stored."""
    if not _told_of["orientation"]:
        _told_of["orientation"] = True
        warnings.warn(
            f"{name} has an EXIF orientation and is turned upright, and {labels}: they have to be "
            "of the upright image; rewrite images and labels without it if they are not",
            stacklevel=3,
        )


def is_pillow(thing: object) -> "TypeGuard[Image.Image]":
    """Returns True for a Pillow image."""
    return hasattr(thing, "convert") and hasattr(thing, "getexif")


def is_picture(thing: object) -> "TypeGuard[str | Path | Image.Image]":
    """Returns True for the path of a file and for a Pillow image."""
    return isinstance(thing, str | Path) or is_pillow(thing)


def upright(image: "Image.Image", name: str = "the image") -> np.ndarray:
    """Returns a Pillow image as uint8 (H, W, 3), with its EXIF orientation applied."""
    from PIL import ExifTags, ImageOps

    tags = getattr(image, "tag_v2", {})  # of a TIFF, whose 12 bits Pillow reads as the low ones
    largest = 4095 if tags.get(ExifTags.Base.BitsPerSample) == (12,) else 65535
    return np.asarray(_as_rgb(ImageOps.exif_transpose(image), name, largest))


def _tell_of_frames(image: "Image.Image", name: str) -> None:
    # Phones write a preview as a second frame of a JPEG (MPO).
    if image.format != "MPO" and getattr(image, "is_animated", False) and not _told_of["frames"]:
        _told_of["frames"] = True
        warnings.warn(
            f"{name} has several frames; the first frame of such images is used", stacklevel=2
        )


# Warnings that the process has issued.
_told_of = {"frames": False, "orientation": False}


def warn_of_range(images: np.ndarray) -> None:
    """Warns of images (..., C) that are not values from 0 to 255, of which 255 is white."""
    if images.dtype == np.uint8 or not images.size:
        return
    low, high = images.min(), images.max()
    kind = {"f": "float", "b": "bool"}.get(images.dtype.kind)
    if kind and low >= 0 and 0 < high <= 1:
        warnings.warn(
            f"{kind} images have no value above 1 and are read as values from 0 to 255, "
            "which is almost black; multiply them by 255",
            stacklevel=3,
        )
    elif not (low >= 0 and high <= 255):
        warnings.warn(
            f"images have values from {low:g} to {high:g} and are read as values from 0 to 255; "
            "give them before they are normalized, or use a model without a preprocessor",
            stacklevel=3,
        )


def _as_rgb(image: "Image.Image", name: str, largest: int) -> Any:
    """Returns an image in the mode RGB; `largest` is white in greys of more than 8 bits."""
    from PIL import Image

    if image.mode == "F":
        grey = np.asarray(image)
        if not grey.min() >= 0 or not grey.max() <= 255:
            raise PictureError(name, f"floats from {grey.min()} to {grey.max()}, not from 0 to 255")
        warn_of_range(grey)
        image = Image.fromarray(np.round(grey).astype("uint8"))

    if image.mode.startswith("I"):
        # "I;16" and its byte orders hold 16 bits, and "I" in a PNG does too.
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > largest:
            raise PictureError(
                name, f"values from {grey.min()} to {grey.max()}, not from 0 to {largest}"
            )
        image = Image.fromarray(np.round(grey.astype("float64") * (255 / largest)).astype("uint8"))
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
