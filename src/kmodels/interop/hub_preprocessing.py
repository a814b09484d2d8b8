"""Tokenizers and image converters of keras-hub, and what they are here."""

import inspect
from collections.abc import Sequence
from typing import Any

from kmodels.errors import InputError
from kmodels.text import Tokenizer

TEXT = ("sequence_length", "add_start_token", "add_end_token")
INTERPOLATION = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "lanczos3": "lanczos",
}
# Enough digits to give back the mean and deviation that scale and offset were made of.
DIGITS = 10


def to_ours(preprocessor: Any, config: Any, kind: Any) -> Any:
    """A preprocessor of kmodels that does what keras-hub's does.

    Args:
        preprocessor: of a task of keras-hub.
        config: of the backbone here.
        kind: class of the preprocessor here.

    Raises:
        InputError: for settings without a counterpart.
    """
    if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
        origin = f"the {type(tokenizer).__name__} of keras-hub"
        mine = Tokenizer.from_sentencepiece(tokenizer.proto, origin)
        return kind(mine, **{name: getattr(preprocessor, name) for name in TEXT})
    converter = getattr(preprocessor, "image_converter", None)
    if converter is None:
        raise InputError(
            f"{type(preprocessor).__name__} has neither tokenizer nor image converter; give "
            "preprocessor=False"
        )
    return kind(**picture_settings(converter, config.image_shape))


def picture_settings(converter: Any, image_shape: Sequence[int]) -> dict[str, Any]:
    """The settings of an image converter as arguments of a preprocessor here.

    Args:
        converter: a `keras_hub.layers.ImageConverter`.
        image_shape: (height, width, channels) of the backbone.

    Raises:
        InputError: for padding, or an interpolation that is not here.
    """
    given = converter.get_config()
    name, channels = given["interpolation"], image_shape[2]
    wrong = {
        "pad_to_aspect_ratio": given["pad_to_aspect_ratio"],
        f"interpolation={name!r}": name not in INTERPOLATION,
    }
    if problems := [text for text, there in wrong.items() if there]:
        raise InputError(f"no preprocessor here has {', '.join(problems)} of keras-hub's converter")
    scale = _each(1.0 if given["scale"] is None else given["scale"], channels)
    offset = _each(0.0 if given["offset"] is None else given["offset"], channels)
    std = [round(1 / (255 * x), DIGITS) for x in scale]
    return {
        "image_size": tuple(given["image_size"] or image_shape[:2]),
        "mean": tuple(round(-x * s, DIGITS) for x, s in zip(offset, std, strict=True)),
        "std": tuple(std),
        "interpolation": INTERPOLATION[name],
        "antialias": given["antialias"],
        "crop_to_aspect_ratio": given["crop_to_aspect_ratio"],
    }


def _each(value: Any, channels: int) -> list[float]:
    return (
        [float(value)] * channels if isinstance(value, int | float) else [float(x) for x in value]
    )


def to_theirs(preprocessor: Any, kind: Any) -> Any:
    """A preprocessor of keras-hub that does what ours does.

    Args:
        preprocessor: of a task of kmodels.
        kind: class of keras-hub's.

    Raises:
        InputError: for a tokenizer that keras-hub cannot hold, or where keras-hub needs TensorFlow.
    """
    try:
        if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
            settings = {name: getattr(preprocessor, name) for name in TEXT}
            return kind(_tokenizer(tokenizer, kind.tokenizer_cls), **settings)
        return kind(kind.image_converter_cls(**_converter(preprocessor)))
    except (ImportError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"keras-hub cannot make its {kind.__name__}: {reason} Or give preprocessor=False"
        ) from None


def _tokenizer(tokenizer: Tokenizer, kind: Any) -> Any:
    more = {}
    if "has_vision_tokens" in inspect.signature(kind.__init__).parameters:
        more["has_vision_tokens"] = False
    return kind(tokenizer.to_sentencepiece(), **more)


def _converter(preprocessor: Any) -> dict[str, Any]:
    theirs = {ours: name for name, ours in INTERPOLATION.items()}
    return {
        "image_size": preprocessor.image_size,
        "scale": [1 / (255 * s) for s in preprocessor.std],
        "offset": [-m / s for m, s in zip(preprocessor.mean, preprocessor.std, strict=True)],
        "interpolation": theirs[preprocessor.interpolation],
        "antialias": preprocessor.antialias,
        "crop_to_aspect_ratio": preprocessor.crop_to_aspect_ratio,
    }
