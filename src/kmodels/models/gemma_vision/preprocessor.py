"""Images and texts to what a Gemma 3 takes, and back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from kmodels.models.common.image_text import transformers_files
from kmodels.models.common.image_text.pan_and_scan import PanAndScanConverter
from kmodels.models.common.image_text.preprocessor import ImageTextLMPreprocessor
from kmodels.models.gemma.preprocessor import CHATS, Gemma3CausalLMPreprocessor
from kmodels.models.gemma.tokenizer import Gemma3Tokenizer

CROPPED = "Here is the original image {} and here are some crops to help you see better {}"


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageConverter(PanAndScanConverter):
    """`PanAndScanConverter` with the size and the range of Gemma 3; keras-hub's name.

    Args:
        image_size: (height, width) in pixels.
        scale: as there, like all that is not listed; pixels go from -1 to 1.
        offset: as there.
        **kwargs: of `PanAndScanConverter`. Unlike keras-hub's defaults, images are smoothed and not
            cropped, as the checkpoints were trained.

    Call:
        As of `PanAndScanConverter`.
    """

    family = "gemma_vision"

    def __init__(
        self,
        image_size: Sequence[int] = (896, 896),
        scale: float | Sequence[float] | None = 1 / 127.5,
        offset: float | Sequence[float] | None = -1.0,
        **kwargs: Any,
    ):
        super().__init__(image_size, scale, offset, **kwargs)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextLMPreprocessor(ImageTextLMPreprocessor, Gemma3CausalLMPreprocessor):
    """Turns texts with images into what a Gemma 3 takes; arguments of `ImageTextLMPreprocessor`.

    Args:
        tokenizer: a `Gemma3Tokenizer` or another `kmodels.text.Tokenizer`, what its `to_dict`
            gives, or a path that `Tokenizer.from_file` reads; it has <start_of_image>,
            <image_soft_token> (or <img>) and <end_of_image>.
        image_converter: a `Gemma3ImageConverter`, what its `to_dict` gives, or None for one of 896
            pixels.
        sequence_length: see there, like all that follow.
        add_start_token: see there.
        add_end_token: see there.
        max_images_per_prompt: see there.
        num_vision_tokens_per_image: see there.
        template: "gemma" writes chats where the tokenizer has no template of its own.
        loss_on: see there.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        As of `ImageTextLMPreprocessor`.
    """

    family = "gemma_vision"
    tokenizer_class = Gemma3Tokenizer
    converter_class = Gemma3ImageConverter
    reader = "Gemma 3"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")
    chats = {"gemma": replace(CHATS["gemma"], image="<start_of_image>")}  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "boi_token": ("<start_of_image>",),
        "image_token": ("<image_soft_token>", "<img>"),
        "eoi_token": ("<end_of_image>",),
    }

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns what stands in a text for an image (1 + crops, height, width, 3)."""
        one, crops = f"\n\n{self.sequence(self.num_vision_tokens_per_image)}\n\n", len(pixels) - 1
        return CROPPED.format(one, " ".join([one] * crops)) if crops else one

    def transformers_files(self) -> dict[str, dict[str, Any]]:
        """Returns preprocessor_config.json and processor_config.json for transformers.

        Raises:
            InputError: for an image converter that transformers cannot express.
        """
        count = self.num_vision_tokens_per_image
        return transformers_files.describe(self.image_converter, count, "Gemma3")
