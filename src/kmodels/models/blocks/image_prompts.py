"""Preprocessor of texts with images for two towers, as in keras-hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.models.blocks.image_converter import ImageConverter
from kmodels.models.blocks.text_preprocessor import TextPreprocessor
from kmodels.text import Tokenizer


class PromptsAndImages(TextPreprocessor):
    """A `TextPreprocessor` that converts images too; the base of CLIP's and SigLIP's.

    `image_converter` preprocesses images, or is its form as serialized by Keras; None for texts
    alone. The other arguments are those of `TextPreprocessor`.

    Call:
        x: as of `TextPreprocessor`, or {"prompts": texts, "images": images} with images as the
            converter takes them, or None.
        y, sample_weight: handed through.

    The outputs are those of `TextPreprocessor`, with "images" if any were given.

    Raises:
        InputError: as there, or for images without a converter.
    """

    reader: ClassVar[str]

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 77,
        add_start_token: bool = True,
        add_end_token: bool = True,
        **kwargs: Any,
    ):
        super().__init__(tokenizer, sequence_length, add_start_token, add_end_token, **kwargs)
        if isinstance(image_converter, Mapping):
            image_converter = keras.saving.deserialize_keras_object(dict(image_converter))
        # Around Keras' __setattr__, which would take it for a part with weights.
        object.__setattr__(self, "image_converter", image_converter)

    def _apart(self, x: Data) -> tuple[Any, Any]:
        """Returns texts, and images by name; {} without images."""
        if not isinstance(x, Mapping) or "images" not in x:
            return x, {}
        if x["images"] is not None and self.image_converter is None:
            raise InputError(f"{self.reader} got images and has no image_converter; give one")
        texts = {name: value for name, value in x.items() if name != "images"}
        return texts, {"images": x["images"]}

    def _converted(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        texts, images = self._apart(x)
        inputs = super()._converted(texts, None, None, length)
        for name, values in images.items():
            inputs[name] = None if values is None else self.image_converter(values)
        return keras.utils.pack_x_y_sample_weight(inputs, y, sample_weight)

    def _spec(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        texts, images = self._apart(x)
        inputs = super()._spec(texts, None, None, length)
        for name, values in images.items():
            inputs[name] = self.image_converter.compute_output_spec(values)
        return keras.utils.pack_x_y_sample_weight(inputs, y, sample_weight)

    def _settings(self) -> dict[str, Any]:
        if self.image_converter is None:
            return super()._settings()
        converter = keras.saving.serialize_keras_object(self.image_converter)
        return {**super()._settings(), "image_converter": converter}
