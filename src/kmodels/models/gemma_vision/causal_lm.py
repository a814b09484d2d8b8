"""Text generation with a Gemma 3 that reads images, and its training."""

from typing import Any

import keras

from kmodels.models.common.image_text.decoder import GIVEN, IMAGES
from kmodels.models.common.inputs import NAMES
from kmodels.models.gemma.causal_lm import Gemma3CausalLM
from kmodels.models.gemma_vision.model import Gemma3ImageTextBackbone
from kmodels.models.gemma_vision.preprocessor import Gemma3ImageTextLMPreprocessor
from kmodels.models.vit.weights import gemma3_mmproj


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextLM(Gemma3CausalLM):
    """A Gemma 3 that predicts the next token of a text with images; all is as in `Gemma3CausalLM`.

    Example:
        model = kmodels.models.Gemma3ImageTextLM.from_preset("path/to/hf_directory")
        model.generate({"prompts": "<start_of_image> What is this?", "images": "cat.jpg"})
    """

    backbone_class = Gemma3ImageTextBackbone
    takes_images = True
    preprocessor_class = Gemma3ImageTextLMPreprocessor
    takes = (*NAMES, *IMAGES)
    absent = GIVEN
    projector = gemma3_mmproj.EXPORT

    def beside_transformer(self) -> tuple[dict[str, Any], list[Any]]:
        """Returns the files of the processor for an export to transformers, and no rules."""
        return ({} if self.preprocessor is None else self.preprocessor.transformers_files()), []
