"""The configuration of a CLIP text tower, validated in one place."""

from dataclasses import dataclass
from typing import ClassVar

from kmodels.core.errors import check_whole
from kmodels.models.common.encoder.config import TextEncoderConfig


@dataclass(frozen=True)
class CLIPTextConfig(TextEncoderConfig):
    """Sizes of a CLIP text tower; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table; like all that is not listed, as there.
        end_token_id: of the token at whose first place a text is pooled; None for the highest id of
            the text, which in CLIP's own vocabulary is that token.

    Raises:
        InputError: for sizes that do not fit together.
    """

    causal: ClassVar[bool] = True
    intermediate_activation: str = "quick_gelu"
    end_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_token_id is not None:
            check_whole("end_token_id", self.end_token_id, 0)
