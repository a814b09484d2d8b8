"""Images in the size and range of numbers that a model takes, by keras-hub's arguments."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.runtime import check_channels_last
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.data.images.decoding import is_picture, warn_of_range, with_channels
from kmodels.data.images.resizing import Resizing, sides_of
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.models.blocks.preprocessing import Preprocessor

# keras-hub's names of the kernels.
INTERPOLATION = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "lanczos3": "lanczos",
}

# The arguments of keras-hub's converter that a converter here has too.
HUB = (
    *("image_size", "scale", "offset", "crop_to_aspect_ratio", "pad_to_aspect_ratio"),
    *("interpolation", "antialias"),
)
# Enough digits to give back the mean and deviation that scale and offset were made of.
DIGITS = 10


class ImageConverter(Preprocessor):
    """Resizes images, then multiplies them by `scale` and adds `offset`, as keras-hub's.

    The base of each family's own.

    Args:
        image_size: (height, width) in pixels, or None to keep the size.
        scale: a number, or one per channel; None for 1.
        offset: a number, or one per channel; None for 0.
        crop_to_aspect_ratio: takes the largest middle part of the shape of `image_size`.
        pad_to_aspect_ratio: must be False.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos3".
        antialias: smooths images when they are made smaller; "lanczos3" does not support False.
        bounding_box_format: "yxyx", keras-hub's default; there are no bounding boxes.
        data_format: "channels_last" or None.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        images (B, H, W, C), one image (H, W, C), or a list of images of any size -> float32
        (B, height, width, C), or (height, width, C) of one image.

    Raises:
        InputError: for padding, bounding boxes, channels in front, or an interpolation that is
            not here.
    """

    def __init__(
        self,
        image_size: Sequence[int] | None = None,
        scale: float | Sequence[float] | None = None,
        offset: float | Sequence[float] | None = None,
        crop_to_aspect_ratio: bool = True,
        pad_to_aspect_ratio: bool = False,
        interpolation: str = "bilinear",
        antialias: bool = False,
        bounding_box_format: str = "yxyx",
        data_format: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_supported(pad_to_aspect_ratio, interpolation)
        if bounding_box_format != "yxyx":
            raise InputError(
                f"bounding_box_format is {bounding_box_format!r}; images have no bounding boxes "
                "here: leave it out"
            )
        if data_format not in (None, "channels_last"):
            raise InputError(
                f"data_format is {data_format!r}; images are (height, width, channels): leave it "
                "out"
            )
        self.image_size = None if image_size is None else sides_of(image_size)
        self.scale = scale
        self.offset = offset
        self.interpolation = interpolation
        self.resizing = Resizing(INTERPOLATION[interpolation], antialias, crop_to_aspect_ratio)

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns converted images; with labels or weights a tuple."""
        images = self.scaled(pictures(x, self.image_size, self.resizing))
        return keras.utils.pack_x_y_sample_weight(images, y, sample_weight)

    def scaled(self, images: np.ndarray) -> np.ndarray:
        """Returns images (..., C) in [0, 255] times `scale` plus `offset`."""
        if self.scale is not None:
            images = images * self._by_channel("scale", images.shape[-1])
        if self.offset is not None:
            images = images + self._by_channel("offset", images.shape[-1])
        return images

    def compute_output_spec(
        self, x: keras.KerasTensor, y: Data = None, sample_weight: Data = None
    ) -> Any:
        """Returns shapes and dtypes that `call` gives."""
        spec = keras.KerasTensor(output_shape(x.shape, self.image_size), "float32")
        return keras.utils.pack_x_y_sample_weight(spec, y, sample_weight)

    def _by_channel(self, name: str, channels: int) -> np.ndarray:
        value = np.asarray(getattr(self, name), "float32")
        if value.ndim and value.shape != (channels,):
            raise InputError(
                f"{name} has {value.size} values and the images {channels} channels; give one "
                "per channel, or one number"
            )
        return value

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {
            "image_size": None if self.image_size is None else list(self.image_size),
            "scale": _plain(self.scale),
            "offset": _plain(self.offset),
            "crop_to_aspect_ratio": self.resizing.crop_to_aspect_ratio,
            "pad_to_aspect_ratio": False,
            "interpolation": self.interpolation,
            "antialias": self.resizing.antialias,
        }


def pictures(
    x: Any, size: Sequence[int] | None, resizing: Resizing, channels: int | None = None
) -> np.ndarray:
    """Returns images of any framework in one size, float32 (B, height, width, C) in [0, 255].

    They are (B, H, W, C), or a list of images of any size, of Pillow or paths of files; for one
    image (H, W, C) it returns (height, width, C). A size of None keeps theirs. `channels` is what
    each image must have; None for any number.
    """
    check_channels_last()
    if is_picture(x):
        return _resize(picture(x, channels), size, resizing)
    if isinstance(x, list | tuple):
        return np.stack([_resize(picture(one, channels), size, resizing) for one in x])
    x = to_numpy(x)
    if x.ndim != 4:
        return _resize(picture(x, channels), size, resizing)
    _check_channels(x, channels)
    warn_of_range(x)
    if size is None or (x.shape[1:3] == size and resizing.resize_size is None):
        return x.astype("float32")
    if not len(x):
        return np.zeros((0, *size, x.shape[-1]), "float32")
    return np.stack([_resize(one, size, resizing) for one in x])


def output_shape(shape: Sequence[int | None], size: Sequence[int] | None) -> tuple[int | None, ...]:
    """Returns the shape of images after `pictures`."""
    check_channels_last()
    return tuple(shape) if size is None else (*shape[:-3], *size, shape[-1])


def check_supported(pads: bool, interpolation: str) -> None:
    """Raises `InputError` for settings of keras-hub's converter that are not supported."""
    wrong = {
        "pad_to_aspect_ratio": pads,
        f"interpolation={interpolation!r}": interpolation not in INTERPOLATION,
    }
    if problems := [text for text, there in wrong.items() if there]:
        raise InputError(f"no preprocessor here has {', '.join(problems)} of keras-hub's converter")


def each_channel(value: float | Sequence[float] | np.ndarray, channels: int) -> list[float]:
    """Returns one number per channel, also if one is given for all."""
    values = np.ravel(np.asarray(value, "float64"))
    if values.size not in (1, channels):
        raise InputError(
            f"scale or offset has {values.size} values for {channels} channels; give one per "
            "channel, or one number"
        )
    return np.broadcast_to(values, channels).tolist()


def _plain(value: float | Sequence[float] | None) -> float | list[float] | None:
    if isinstance(value, Sequence | np.ndarray):
        return [float(x) for x in value]
    return value


def picture(image: object, channels: int | None) -> np.ndarray:
    """Returns one image (H, W, C) of any framework or of Pillow, or of the file at a path.

    An image of Pillow or of a file is given these channels, others must have them; None for any.
    """
    if isinstance(image, np.ndarray) and image.ndim == 0 and image.dtype.kind in "OU":
        image = image.item()
    if is_picture(image):
        return with_channels(open_picture(image), channels or 3)
    x: np.ndarray = to_numpy(image)
    if x.ndim != 3:
        raise InputError(f"an image has shape {x.shape}; give (height, width, channels)")
    _check_channels(x, channels)
    warn_of_range(x)
    return x


def _check_channels(x: np.ndarray, channels: int | None) -> None:
    if channels is not None and x.shape[-1] != channels:
        raise InputError(f"an image has shape {x.shape}; give (height, width, {channels})")


def _resize(picture: np.ndarray, size: Sequence[int] | None, resizing: Resizing) -> np.ndarray:
    if size is None:
        return picture.astype("float32")
    height, width = size
    if not resizing.keeps_bytes:
        picture = picture.astype("float32")
    # The kernels with negative parts leave the range of pixels.
    return np.clip(resizing(picture, (height, width)).astype("float32"), 0.0, 255.0)
