"""The configuration of a CLIP text tower, validated in one place."""

from dataclasses import dataclass

from kmodels.models.common.encoder.end_token import EndTokenConfig


@dataclass(frozen=True)
class CLIPTextConfig(EndTokenConfig):
    """Sizes of a CLIP text tower; fields as of `EndTokenConfig`, names as in keras-hub."""

    intermediate_activation: str = "quick_gelu"
