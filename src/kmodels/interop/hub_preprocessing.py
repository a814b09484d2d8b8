"""Tokenizers and image converters of keras-hub, and what they are here."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.image_converter import HUB
from kmodels.text import Tokenizer

TEXT = ("sequence_length", "add_start_token", "add_end_token")
IMAGES = ("max_images_per_prompt", "num_vision_tokens_per_image")


def to_ours(preprocessor: keras.Layer, config: Any, kind: type) -> Any:
    """Returns a preprocessor of kmodels that does what keras-hub's does.

    Args:
        preprocessor: that of a task of keras-hub.
        config: config of the backbone here.
        kind: class of the preprocessor here.

    Raises:
        InputError: for settings without a counterpart.
    """
    if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
        origin = f"the {type(tokenizer).__name__} of keras-hub"
        mine = kind.tokenizer_class.from_sentencepiece(tokenizer.proto, origin)
        settings = {name: getattr(preprocessor, name) for name in TEXT}
        if getattr(kind, "takes_images", False):
            settings |= {name: getattr(preprocessor, name) for name in IMAGES}
            settings["image_converter"] = preprocessor.image_converter
        return kind(mine, **settings)
    converter = getattr(preprocessor, "image_converter", None)
    if converter is None:
        raise InputError(
            f"{type(preprocessor).__name__} has neither tokenizer nor image converter; give "
            "preprocessor=False"
        )
    *size, channels = config.image_shape
    return kind(size, (0.0,) * channels, (1.0,) * channels, image_converter=converter)


def to_theirs(preprocessor: keras.Layer, kind: type) -> Any:
    """Returns a preprocessor of keras-hub that does what ours does.

    Args:
        preprocessor: that of a task of kmodels.
        kind: class of keras-hub's.

    Raises:
        InputError: for a tokenizer that keras-hub cannot hold, or where keras-hub needs TensorFlow.
    """
    try:
        if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
            settings = {name: getattr(preprocessor, name) for name in TEXT}
            images = getattr(preprocessor, "image_tokens", None)
            if images:
                settings |= {name: getattr(preprocessor, name) for name in IMAGES}
                settings["image_converter"] = _converter(preprocessor, kind.image_converter_cls)
            return kind(_tokenizer(tokenizer, kind.tokenizer_cls, images), **settings)
        return kind(kind.image_converter_cls(**preprocessor.image_converter.to_dict()))
    except (ImportError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"keras-hub cannot make its {kind.__name__}: {reason} Or give preprocessor=False"
        ) from None


def _converter(preprocessor: Any, kind: type) -> Any:
    """Returns the image converter of a preprocessor of texts with images."""
    converter = preprocessor.image_converter
    if converter.do_pan_and_scan:
        raise InputError(
            f"keras-hub's {kind.__name__} has no counterpart for do_pan_and_scan; set it to False, "
            "or give preprocessor=False"
        )
    return kind(**{name: x for name, x in converter.to_dict().items() if name in HUB})


def _tokenizer(tokenizer: Tokenizer, kind: type, images: Mapping[str, str] | None) -> Any:
    if images:
        return kind(tokenizer.to_sentencepiece(tuple(images.values())))
    # Tokens of images, sounds and videos, which its Gemma 3 and 4 ask the vocabulary for.
    names = inspect.signature(kind.__init__).parameters
    more = {name: False for name in names if name.startswith("has_") and name.endswith("_tokens")}
    return kind(tokenizer.to_sentencepiece(), **more)
