"""Images and texts to what a Gemma 4 takes, and back."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from kmodels.models.common.hub_order import in_order
from kmodels.models.common.image_text import patch_files
from kmodels.models.common.image_text.patch_converter import PatchConverter
from kmodels.models.common.image_text.patch_preprocessor import PatchTextLMPreprocessor
from kmodels.models.gemma.preprocessor import (
    CHATS,
    ORDER_4,
    Gemma4CausalLMPreprocessor,
    without_sound,
)
from kmodels.models.gemma.tokenizer import Gemma4Tokenizer
from kmodels.text import Tokenizer


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageConverter(PatchConverter):
    """`PatchConverter` of Gemma 4; keras-hub's name.

    Arguments are those of `PatchConverter`: `merge_patches` is True for Gemma 4 12B, which has no
    encoder, and the checkpoints know 70, 140, 280, 560 and 1120 as `max_soft_tokens`.

    Call:
        As of `PatchConverter`.
    """

    family = "gemma4_vision"


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextLMPreprocessor(PatchTextLMPreprocessor, Gemma4CausalLMPreprocessor):
    """Turns texts with images of any shape into what a Gemma 4 takes.

    Arguments are those of `PatchTextLMPreprocessor`. The tokenizer is a `GemmaTokenizer` or
    another with <|image>, <|image|> and <image|>, the image converter a `Gemma4ImageConverter`,
    and "gemma4" writes chats where the tokenizer has no template of its own.

    Call:
        As of `PatchTextLMPreprocessor`, with <|image|> where an image belongs.
    """

    family = "gemma4_vision"
    tokenizer_class = Gemma4Tokenizer
    converter_class = Gemma4ImageConverter
    reader = "Gemma 4"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma4CausalLMPreprocessor")
    chats = {"gemma4": replace(CHATS["gemma4"], image="<|image|>")}  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "boi_token": ("<|image>",),
        "image_token": ("<|image|>",),
        "eoi_token": ("<image|>",),
    }

    @in_order(*ORDER_4)
    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: Gemma4ImageConverter | Mapping[str, Any] | None = None,
        num_vision_tokens_per_image: int | None = None,
        **kwargs: Any,
    ):
        more = without_sound(type(self).__name__, kwargs)
        super().__init__(tokenizer, image_converter, **more)
        most = self.image_converter.max_soft_tokens
        if num_vision_tokens_per_image not in (None, most):
            warnings.warn(
                f"num_vision_tokens_per_image={num_vision_tokens_per_image} is not used: an image "
                f"takes the tokens of its shape, at most the converter's max_soft_tokens={most}",
                stacklevel=2,
            )

    def transformers_files(self) -> dict[str, Mapping[str, Any]]:
        """Returns preprocessor_config.json and processor_config.json for transformers.

        Raises:
            InputError: for an image converter that transformers cannot express.
        """
        name = "Gemma4Unified" if self.image_converter.merge_patches else "Gemma4"
        return patch_files.describe(self.image_converter, name)
