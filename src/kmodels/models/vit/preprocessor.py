"""Image preprocessing of a ViT: the preprocessor of tasks, and keras-hub's image converter."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.data.images.resizing import Resizing, ResizingOfBytes, sides_of
from kmodels.models.blocks.image_converter import (
    DIGITS,
    INTERPOLATION,
    ImageConverter,
    check_supported,
    each_channel,
    output_shape,
    pictures,
)
from kmodels.models.blocks.preprocessing import ImageClassifierPreprocessor
from kmodels.models.vit.config import ViTConfig


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageConverter(ImageConverter):
    """`ImageConverter` of a ViT, by keras-hub's name; arguments and calls are as there."""

    family = "vit"


def settings_of(converter: keras.Layer, image_size: Sequence[int], channels: int) -> dict[str, Any]:
    """Returns the settings of an image converter as arguments of a preprocessor.

    Args:
        converter: a `ViTImageConverter` or a `keras_hub.layers.ImageConverter`.
        image_size: (height, width) if the converter has none.
        channels: channels of the images, for a scale or offset that is one number.

    Raises:
        InputError: for padding, or an interpolation that is not here.
    """
    if not isinstance(converter, keras.layers.Layer):
        raise InputError(f"image_converter is {converter!r}; give one such as ViTImageConverter()")
    settings: Mapping[str, Any] = converter.get_config()
    name = settings["interpolation"]
    check_supported(settings["pad_to_aspect_ratio"], name)
    scale = each_channel(1.0 if settings["scale"] is None else settings["scale"], channels)
    if not min(scale) > 0:
        raise InputError(f"scale of the image converter is {settings['scale']}; give more than 0")
    offset = each_channel(0.0 if settings["offset"] is None else settings["offset"], channels)
    std = [round(1 / (255 * x), DIGITS) for x in scale]
    return {
        "image_size": tuple(settings["image_size"] or image_size),
        "mean": tuple(round(-x * s, DIGITS) for x, s in zip(offset, std, strict=True)),
        "std": tuple(std),
        "interpolation": INTERPOLATION[name],
        "antialias": settings["antialias"],
        "crop_to_aspect_ratio": settings["crop_to_aspect_ratio"],
    }


def converter_settings(preprocessor: keras.Layer) -> dict[str, Any]:
    """Returns a preprocessor's settings as arguments of an image converter."""
    theirs = {ours: name for name, ours in INTERPOLATION.items()}
    return {
        "image_size": preprocessor.image_size,
        "scale": [1 / (255 * s) for s in preprocessor.std],
        "offset": [-m / s for m, s in zip(preprocessor.mean, preprocessor.std, strict=True)],
        "interpolation": theirs[preprocessor.interpolation],
        "antialias": preprocessor.antialias,
        "crop_to_aspect_ratio": preprocessor.crop_to_aspect_ratio,
    }


# Arguments of the preprocessor of NaFlex models, in files that models of one size read too.
OF_PATCHES = ("patch_size", "max_num_patches", "enlarge")
# The same of segmenters.
OF_MASKS = ("resize_output_mask", "aspect_ratio")
# Arguments of those that cut out the middle of images, which leaves pixels without a class.
OF_CROPS = ("crop_to_aspect_ratio", "resize_size", "rounds_center", "resize_mode")


def of_resizing(name: str, doc: str) -> Any:
    """Returns a property of a preprocessor for a setting of its `resizing`."""
    return property(lambda preprocessor: getattr(preprocessor.resizing, name), doc=doc)


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageClassifierPreprocessor(ImageClassifierPreprocessor):
    """Resizes, scales to [0, 1] and normalises images.

    Args:
        image_size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
        antialias: smooths images when they are made smaller, as Pillow does; False, which "lanczos"
            does not support, for checkpoints that were trained without.
        crop_to_aspect_ratio: crops the largest center part with the aspect ratio of `image_size`
            instead of stretching the image.
        resize_size: the size before the center crop of `image_size`: the length of the shorter
            side, or (height, width); None to resize to `image_size`.
        rounds_center: rounds the position of the center crop as torchvision and timm do; False as
            transformers does.
        resize_mode: "stretch"; "cover" or "fit" to keep the aspect ratio of images that cover a
            `resize_size` of (height, width), or fit into it with the mean around them; "crop" for a
            center crop without resizing; "none" to refuse images of another size.
        image_converter: a `ViTImageConverter`, or keras-hub's; all of the above is read from it.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        x: uint8 images (B, H, W, C), one image (H, W, C), or a list of images of any size;
            floats are taken as values in [0, 255].
        y, sample_weight: returned unchanged.
        -> float32 (B, height, width, C), or (height, width, C) of one image; with y or weights a
        tuple, as Keras' preprocessors give it.

    Raises:
        InputError: for invalid settings, and for something that is not an image or has another
            number of channels.
    """

    family = "vit"
    # False if labels are of whole images.
    may_crop: ClassVar[bool] = True

    interpolation = of_resizing("interpolation", "The kernel that resizes.")
    antialias = of_resizing("antialias", "True if images are smoothed when they are made smaller.")
    crop_to_aspect_ratio = of_resizing("crop_to_aspect_ratio", "True if images are cropped.")
    resize_size = of_resizing("resize_size", "The size before the center crop, or None.")
    rounds_center = of_resizing("rounds_center", "True if the crop is rounded as in torchvision.")
    resize_mode = of_resizing("resize_mode", "The `resize_mode` argument of the class.")

    def __init__(
        self,
        image_size: Sequence[int] | ViTImageConverter = (224, 224),
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bilinear",
        antialias: bool = True,
        crop_to_aspect_ratio: bool = False,
        resize_size: int | Sequence[int] | None = None,
        rounds_center: bool = False,
        resize_mode: str = "stretch",
        *,
        image_converter: ViTImageConverter | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if isinstance(image_size, keras.layers.Layer):  # by position, as in keras-hub
            image_converter, image_size = image_size, (224, 224)
        if image_converter is not None:
            settings = settings_of(image_converter, image_size, len(mean))
            image_size, mean, std = settings["image_size"], settings["mean"], settings["std"]
            interpolation, antialias = settings["interpolation"], settings["antialias"]
            crop_to_aspect_ratio = settings["crop_to_aspect_ratio"]
        self.image_size = sides_of(image_size)
        for name, values in (("mean", mean), ("std", std)):
            if np.ndim(values) != 1 or not np.isfinite(np.asarray(values, "float64")).all():
                raise InputError(f"{name} is {values}; give a number per channel")
        self.mean, self.std = tuple(mean), tuple(std)
        if len(self.mean) != len(self.std):
            raise InputError(
                f"mean has {len(self.mean)} values and std {len(self.std)}; give one per channel"
            )
        if not min(self.std) > 0:
            raise InputError(f"std is {self.std}; give numbers above 0")
        size = resize_size if resize_size is None else _size(resize_size)
        kind = ResizingOfBytes if antialias else Resizing
        fill = tuple(round(255 * x) for x in self.mean) if resize_mode == "fit" else (0,)
        self.resizing = kind(
            *(interpolation, antialias, crop_to_aspect_ratio, size, rounds_center),
            *(resize_mode, fill),
        )
        if self.resizing.crops and not self.may_crop:
            raise InputError(
                f"{type(self).__name__} has settings that crop images, but not their labels; leave "
                f"{', '.join(OF_CROPS)} out, and give an image converter with "
                "crop_to_aspect_ratio=False"
            )

    @property
    def image_converter(self) -> ViTImageConverter:
        """The settings as a layer with keras-hub's arguments, which sets its own here too.

        Raises:
            InputError: for a preprocessor with `resize_size`, or another `resize_mode`.
        """
        if self.resize_size is not None or self.resize_mode != "stretch":
            raise InputError(
                f"an image converter has no counterpart for resize_size={self.resize_size} and "
                f"resize_mode={self.resize_mode!r}; give None and 'stretch'"
            )
        converter = ViTImageConverter(**converter_settings(self))
        # Keras follows attributes when it reads a file, and would go in circles.
        object.__setattr__(converter, "_owner", weakref.ref(self))
        return converter

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns images to normalised floats."""
        images = pictures(x, self.image_size, self.resizing, channels=len(self.mean))
        mean, std = np.asarray(self.mean, "float32"), np.asarray(self.std, "float32")
        images = (images / np.float32(255.0) - mean) / std
        return keras.utils.pack_x_y_sample_weight(images, y, sample_weight)

    def compute_output_spec(
        self, x: keras.KerasTensor, y: Data = None, sample_weight: Data = None
    ) -> Any:
        """Returns the shapes and dtypes of the outputs."""
        spec = keras.KerasTensor(output_shape(x.shape, self.image_size), "float32")
        return keras.utils.pack_x_y_sample_weight(spec, y, sample_weight)

    def check_plain(self, package: str) -> None:
        """Raises `InputError` if another package's preprocessor cannot resize in this way."""
        if self.crop_to_aspect_ratio or not self.antialias:
            raise InputError(
                f"{package} has no counterpart for a preprocessor with crop_to_aspect_ratio="
                f"{self.crop_to_aspect_ratio} and antialias={self.antialias}; give resize_size, "
                "the shorter side before the middle is cut out, and antialias=True"
            )

    @classmethod
    def fitted(cls, arguments: dict[str, Any], config: ViTConfig) -> dict[str, Any]:
        """Returns a checkpoint's arguments, less those of other tasks; see `Preprocessor`."""
        others = {*OF_PATCHES, *OF_MASKS, *(() if cls.may_crop else OF_CROPS)}
        return {name: value for name, value in arguments.items() if name not in others}

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        crops = {name: getattr(self, name) for name in OF_CROPS} if self.may_crop else {}
        return {
            "image_size": list(self.image_size),
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "antialias": self.antialias,
            **crops,
        }


def _size(value: int | Sequence[int]) -> int | tuple[int, int]:
    if isinstance(value, Sequence | np.ndarray):
        return int(value[0]), int(value[1])
    return int(value)


def fit_crop(settings: dict[str, Any], size: Sequence[int]) -> dict[str, Any]:
    """Returns a preprocessor's arguments for another size, with the same part of each image."""
    old, whole = settings.get("image_size"), settings.get("resize_size")
    if old is None or whole is None or tuple(old) == tuple(size):
        return {**settings, "image_size": tuple(size)}
    ratios = [new / before for new, before in zip(size, old, strict=True)]
    if isinstance(whole, Sequence):
        scaled: Any = tuple(round(x * ratio) for x, ratio in zip(whole, ratios, strict=True))
    else:
        scaled = round(whole * max(ratios))
    return {**settings, "image_size": tuple(size), "resize_size": scaled}
