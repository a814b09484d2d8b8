"""`open_picture`: one image from a file, bytes, a Pillow image, an array or a tensor."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.files import is_remote
from kmodels.core.remote import local_copy
from kmodels.data.images.decoding import (
    PictureError,
    decode,
    is_pillow,
    read_picture,
    upright,
    warn_of_range,
    with_channels,
)
from kmodels.data.pipeline.arrays import to_numpy

# pathlib and fsspec accept "http:/host" and upper case too.
WEB = re.compile(r"\s*(https?|ftps?):/", re.IGNORECASE)
INLINE = "data:image/"
FORMS = "the path of a file, its bytes, an image of Pillow, or an array (height, width, 3)"


def open_picture(image: object, name: str = "the image") -> np.ndarray:
    """Returns an image as a viewer would show it: (H, W, 3), uint8, or float32 of floats.

    `decode` applies the EXIF orientation of a file, and makes transparent parts white.

    Args:
        image: path or storage address of a file that Pillow reads, or "data:image/...;base64,..."
            with one; its bytes; an image of Pillow; an array or tensor (H, W, 3), (H, W, 1) or
            (H, W) with values from 0 to 255; or {"bytes", "path"}, as Hugging Face's datasets have.
        name: name of an image without a path, for messages.

    Raises:
        InputError: for an address of the web, a file that is missing or damaged, or an array of
            another shape or range.
    """
    if isinstance(image, Mapping):
        content = image.get("bytes")
        if isinstance(content, str):
            raise InputError(f"{name} has a text as 'bytes'; give its file as 'path'")
        image = image.get("path") if content is None else content
    if isinstance(image, np.ndarray) and image.dtype.kind in "OSU" and image.ndim == 0:
        image = image.item()
    try:
        if isinstance(image, str | Path):
            return _file(str(image), name)
        if isinstance(image, bytes | bytearray | memoryview):
            return decode(bytes(image), name)
        if is_pillow(image):
            return upright(image, name)
    except PictureError as error:
        raise InputError(f"{error.name}: {error.reason}; repair or remove it") from error
    except OSError as error:  # Pillow reads the file of an image late
        raise InputError(f"{name} cannot be read: {error}") from error
    return _array(image, name)


def check_local(path: str) -> None:
    """Raises `InputError` for an address of the web, or one that chains file systems by "::"."""
    if WEB.match(path):
        raise InputError(
            f"{path[:200]} is an address of the web; download it first and give the path of the "
            "file"
        )
    if is_remote(path) and "::" in path:
        raise InputError(
            f'{path[:200]} chains file systems by "::"; copy the image to a local folder and give '
            "the path of the file"
        )


def _file(path: str, name: str) -> np.ndarray:
    check_local(path)
    if path.startswith(INLINE):
        head, _, text = path.partition(",")
        try:
            return decode(base64.b64decode(text, validate=True), name)
        except binascii.Error as error:
            raise InputError(f"{name} ({head[:40]}) is not base64: {error}") from error
    file = local_copy(path)
    try:
        content = read_picture(file)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return decode(content, path)


def _array(picture: object, name: str) -> np.ndarray:
    array = to_numpy(picture) if hasattr(picture, "__array__") else None
    if array is None or array.dtype.kind not in "uif":
        raise InputError(f"{name} is a {type(picture).__name__}; give {FORMS}")
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[-1] not in (1, 3) or not array.size:
        raise InputError(f"{name} has shape {array.shape}; give (height, width, 3)")
    if array.dtype.kind == "f":
        array = array.astype("float32")
    if not np.isfinite(low := array.min()) or low < 0 or not array.max() <= 255:
        raise InputError(
            f"{name} has values from {low} to {array.max()}; give an image before it is "
            "normalized, with values from 0 to 255"
        )
    warn_of_range(array)
    return with_channels(array if array.dtype.kind == "f" else array.astype("uint8"), 3)
