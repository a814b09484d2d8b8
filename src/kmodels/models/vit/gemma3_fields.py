"""What the config of a text model with `Gemma3VisionEncoder` says of its images."""

from collections.abc import Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.gemma3_encoder import Gemma3VisionEncoder, tokens_per_image

# Settings of the layer that the text model's config says otherwise, or that are not of its sizes.
DERIVED = ("output_dim", "name", "trainable")


class VisionEncoderFields:
    """The encoder of a config, a base of its dataclass.

    Attributes:
        vision_encoder: arguments of `Gemma3VisionEncoder` but `output_dim`; "dtype" is there for a
            policy other than the text's alone.
        hidden_dim: width of the text.
    """

    vision_encoder: Mapping[str, Any] | None
    hidden_dim: int

    def check_vision_encoder(self) -> None:
        """Keeps what counts of the settings.

        Raises:
            InputError: for sizes that do not fit together, or where there are none.
        """
        if self.vision_encoder is None:
            raise InputError(
                "vision_encoder is missing; give the arguments of Gemma3VisionEncoder, or take "
                "Gemma3Backbone for text alone"
            )
        held = {name: x for name, x in self.vision_encoder.items() if name not in DERIVED}
        object.__setattr__(self, "vision_encoder", held)
        tokens_per_image(**held)

    def encoder(self, **settings: Any) -> Gemma3VisionEncoder:
        """Returns the vision encoder that this config describes."""
        held = {**settings, **(self.vision_encoder or {})}
        return Gemma3VisionEncoder(**held, output_dim=self.hidden_dim)

    @property
    def num_vision_tokens_per_image(self) -> int:
        """Tokens that stand for an image in a text."""
        return tokens_per_image(**(self.vision_encoder or {}))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the images."""
        size = (self.vision_encoder or {})["image_size"]
        return size, size, 3
