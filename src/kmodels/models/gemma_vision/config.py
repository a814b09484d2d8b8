"""The configuration of a Gemma 3 with a vision encoder, validated in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.vit.gemma3_fields import VisionEncoderFields


@dataclass(frozen=True)
class Gemma3ImageTextConfig(VisionEncoderFields, GemmaConfig):
    """Sizes of a Gemma 3 that reads images; names as in keras-hub.

    Args:
        vocabulary_size: like all that is not listed, as of `GemmaConfig`.
        vision_encoder: arguments of `Gemma3VisionEncoder` but `output_dim`, which is `hidden_dim`;
            "dtype" is there for a policy other than the text's alone.
        image_token_id: id of the token that stands for each piece of an image; it may lie outside
            the vocabulary.

    Raises:
        InputError: for sizes that do not fit together, or a model that is not causal.
    """

    vision_encoder: Mapping[str, Any] | None = None
    image_token_id: int = 262_144

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("image_token_id", self.image_token_id)
        if not self.is_causal:
            raise InputError(
                "use_bidirectional_attention is True; a model of texts and images is causal, so "
                "leave it out"
            )
        self.check_vision_encoder()

    @property
    def decoder(self) -> GemmaConfig:
        """The config of the text alone."""
        return GemmaConfig(**{x.name: getattr(self, x.name) for x in fields(GemmaConfig)})
