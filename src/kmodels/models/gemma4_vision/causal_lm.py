"""Text generation with a Gemma 4 that reads images, and its training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.gemma.causal_lm import Gemma4CausalLM
from kmodels.models.gemma4_vision.model import Gemma4ImageTextBackbone
from kmodels.models.gemma4_vision.preprocessor import Gemma4ImageTextLMPreprocessor


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextLM(Gemma4CausalLM):
    """A Gemma 4 that predicts the next token of a text with images; all is as in `Gemma4CausalLM`.

    Example:
        model = kmodels.models.Gemma4ImageTextLM.from_preset("path/to/hf_directory")
        model.generate({"prompts": "<|image|> What is this?", "images": "cat.jpg"})
    """

    backbone_class = Gemma4ImageTextBackbone
    takes_images = True
    preprocessor_class = Gemma4ImageTextLMPreprocessor
    takes = Gemma4ImageTextBackbone.takes
    absent = Gemma4ImageTextBackbone.absent

    def beside_transformer(self) -> tuple[dict[str, Mapping[str, Any]], list[Any]]:
        """Returns the files of the processor for an export to transformers, and no rules."""
        return ({} if self.preprocessor is None else self.preprocessor.transformers_files()), []

    def check_mmproj(
        self, path: str | Path, dtype: str, text_only: bool, mmproj: str | Path | None
    ) -> None:
        """Raises `InputError` where a GGUF file is to hold more than the text.

        Args:
            path: see `export_to_gguf`, like all that follow.
            dtype: see there.
            text_only: see there.
            mmproj: see there.
        """
        if not text_only or mmproj is not None:
            raise InputError(
                "a GGUF file holds the text of a Gemma 4 alone, and its vision half has no file of "
                "llama.cpp here; give text_only=True, and leave mmproj out"
            )
