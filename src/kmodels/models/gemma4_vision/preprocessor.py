"""Images and texts to what a Gemma 4 takes, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.models.common.image_text import patch_files
from kmodels.models.common.image_text.batches import patch_arrays
from kmodels.models.common.image_text.patch_converter import PatchConverter
from kmodels.models.common.image_text.preprocessor import ImageTextLMPreprocessor
from kmodels.models.gemma.preprocessor import CHATS
from kmodels.models.gemma.tokenizer import GemmaTokenizer
from kmodels.text import Example, Tokenizer
from kmodels.text.templates import AUTO


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageConverter(PatchConverter):
    """`PatchConverter` of Gemma 4; keras-hub's name.

    Args:
        patch_size: as there, like all that is not listed.
        max_soft_tokens: as there; the checkpoints know 70, 140, 280, 560 and 1120.
        pooling_kernel_size: as there.
        merge_patches: True for Gemma 4 12B, which has no encoder.
        **kwargs: of `PatchConverter`.

    Call:
        As of `PatchConverter`.
    """

    family = "gemma4_vision"

    def __init__(
        self,
        patch_size: int = 16,
        max_soft_tokens: int = 280,
        pooling_kernel_size: int = 3,
        merge_patches: bool = False,
        **kwargs: Any,
    ):
        super().__init__(patch_size, max_soft_tokens, pooling_kernel_size, merge_patches, **kwargs)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextLMPreprocessor(ImageTextLMPreprocessor):
    """Turns texts with images of any shape into what a Gemma 4 takes.

    Args:
        tokenizer: a `GemmaTokenizer` or another `kmodels.text.Tokenizer`, what its `to_dict`
            gives, or a path that `Tokenizer.from_file` reads; it has <|image>, <|image|> and
            <image|>.
        image_converter: a `Gemma4ImageConverter`, what its `to_dict` gives, keras-hub's, or None
            for one with its defaults.
        sequence_length: see `ImageTextLMPreprocessor`, like all that follow.
        add_start_token: see there.
        add_end_token: see there.
        max_images_per_prompt: see there.
        template: "gemma4" writes chats where the tokenizer has no template of its own.
        loss_on: see there.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        As of `ImageTextLMPreprocessor`, with <|image|> where an image belongs, and "pixel_values"
        with "pixel_position_ids" in place of "images", see `patch_arrays`. An image fills as many
        tokens as its shape asks for.
    """

    family = "gemma4_vision"
    tokenizer_class = GemmaTokenizer
    converter_class = Gemma4ImageConverter
    files = staticmethod(patch_files.read)
    reader = "Gemma 4"
    siblings = ("GemmaCausalLMPreprocessor",)
    chats = {"gemma4": replace(CHATS["gemma4"], image="<|image|>")}  # noqa: RUF012
    tokens = {  # noqa: RUF012
        "boi_token": ("<|image>",),
        "image_token": ("<|image|>",),
        "eoi_token": ("<image|>",),
    }

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: PatchConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        max_images_per_prompt: int = 2,
        template: str = AUTO,
        loss_on: str = "responses",
        **kwargs: Any,
    ):
        super().__init__(
            tokenizer,
            image_converter,
            sequence_length,
            add_start_token,
            add_end_token,
            max_images_per_prompt,
            template=template,
            loss_on=loss_on,
            **kwargs,
        )
        self.num_vision_tokens_per_image = self.image_converter.max_soft_tokens

    @property
    def marker(self) -> str:
        """Text that stands where an image belongs."""
        return self.image_tokens["image_token"]

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns what stands in a text for an image (1, height, width, 3)."""
        return self.sequence(self.image_converter.pieces(pixels))

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """See `ImageTextLMPreprocessor.pictures`."""
        return patch_arrays(token_ids, rows, self.image_token_id, self.image_converter)

    def pictures_spec(self, shape: Sequence[int | None]) -> dict[str, keras.KerasTensor]:
        """See `ImageTextLMPreprocessor.pictures_spec`."""
        spec = self.image_converter.compute_output_spec
        return spec(keras.KerasTensor((*shape, None, None, 3)))

    def transformers_files(self) -> dict[str, Mapping[str, Any]]:
        """Returns preprocessor_config.json and processor_config.json for transformers.

        Raises:
            InputError: for an image converter that transformers cannot express.
        """
        name = "Gemma4Unified" if self.image_converter.merge_patches else "Gemma4"
        return patch_files.describe(self.image_converter, name)

    def _settings(self) -> dict[str, Any]:
        held = super()._settings()
        held.pop("num_vision_tokens_per_image")
        return held
