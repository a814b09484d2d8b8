"""The image converter of a ViT, and its settings as those of a preprocessor."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kmodels.models.common.image_text.image_converter import (
    DIGITS,
    INTERPOLATION,
    ImageConverter,
    check_supported,
    each_channel,
)


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageConverter(ImageConverter):
    """`ImageConverter` of a ViT, by keras-hub's name; arguments and calls are as there."""

    family = "vit"


def settings_of(converter: keras.Layer, image_size: Sequence[int], channels: int) -> dict[str, Any]:
    """Returns the settings of an image converter as arguments of a preprocessor.

    Args:
        converter: a `ViTImageConverter` or a `keras_hub.layers.ImageConverter`.
        image_size: (height, width) where the converter has none.
        channels: channels of the images, where scale and offset are one number for all.

    Raises:
        InputError: for padding, or an interpolation that is not here.
    """
    given: Mapping[str, Any] = converter.get_config()
    name = given["interpolation"]
    check_supported(given["pad_to_aspect_ratio"], name)
    scale = each_channel(1.0 if given["scale"] is None else given["scale"], channels)
    offset = each_channel(0.0 if given["offset"] is None else given["offset"], channels)
    std = [round(1 / (255 * x), DIGITS) for x in scale]
    return {
        "image_size": tuple(given["image_size"] or image_size),
        "mean": tuple(round(-x * s, DIGITS) for x, s in zip(offset, std, strict=True)),
        "std": tuple(std),
        "interpolation": INTERPOLATION[name],
        "antialias": given["antialias"],
        "crop_to_aspect_ratio": given["crop_to_aspect_ratio"],
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
