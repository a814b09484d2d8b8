"""Images of any shape and texts to what a causal model takes that reads patches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.models.common.image_text import patch_files
from kmodels.models.common.image_text.batches import patch_arrays
from kmodels.models.common.image_text.patch_converter import PatchConverter
from kmodels.models.common.image_text.preprocessor import ImageTextLMPreprocessor
from kmodels.text import Example, Tokenizer
from kmodels.text.templates import AUTO


class PatchTextLMPreprocessor(ImageTextLMPreprocessor):
    """`ImageTextLMPreprocessor` of patches; an image fills as many tokens as its shape asks for.

    The base of each family's own.

    Args:
        tokenizer: see `ImageTextLMPreprocessor`.
        image_converter: a `PatchConverter`, what its `to_dict` gives, keras-hub's, or None for the
            family's with its defaults.
        sequence_length: see `ImageTextLMPreprocessor`, like all that follow.
        add_start_token: see there.
        add_end_token: see there.
        max_images_per_prompt: see there.
        template: see there.
        loss_on: see there.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        As of `ImageTextLMPreprocessor`, with the token of an image where it belongs, and
        "pixel_values" with "pixel_position_ids" in place of "images", see `patch_arrays`.
    """

    files = staticmethod(patch_files.read)

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

    def _settings(self) -> dict[str, Any]:
        held = super()._settings()
        held.pop("num_vision_tokens_per_image")
        return held
