"""The configuration of a Gemma 4 that reads images, validated in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.vit.gemma4.fields import PatchFields


@dataclass(frozen=True)
class Gemma4ImageTextConfig(PatchFields, GemmaConfig):
    """Sizes of a Gemma 4 that reads images; names as in keras-hub.

    Args:
        vocabulary_size: like all that is not listed, as of `GemmaConfig`.
        vision_encoder: arguments of `Gemma4VisionEncoder` but `output_dim`, which is `hidden_dim`,
            or of `Gemma4VisionEmbedder`, which has no "num_layers"; "dtype" is there for a policy
            other than the text's alone.
        image_token_id: id of the token that stands for each piece of an image.
        use_vision_bidirectional_attention: tokens of an image see each other in local layers, as
            far as the window reaches; in global layers they see what is before them alone.

    Raises:
        InputError: for sizes that do not fit together, or a model that is not causal.
    """

    vision_encoder: Mapping[str, Any] | None = None
    image_token_id: int = 258_880
    use_vision_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("image_token_id", self.image_token_id)
        if not self.is_causal:
            raise InputError(
                "use_bidirectional_attention is True; a model of texts and images is causal, so "
                "leave it out, or set use_vision_bidirectional_attention"
            )
        self.check_vision_encoder()

    @property
    def decoder(self) -> GemmaConfig:
        """The config of the text alone."""
        return GemmaConfig(**{x.name: getattr(self, x.name) for x in fields(GemmaConfig)})

    def looks_ahead(self, layer: int) -> bool:
        """See `DecoderConfig.looks_ahead`."""
        return self.use_vision_bidirectional_attention and self.is_local(layer)
