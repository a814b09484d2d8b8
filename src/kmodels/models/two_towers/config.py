"""The configuration of models with an image and a text tower, validated in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmodels.core.errors import InputError, check_whole
from kmodels.models.clip import CLIPTextConfig
from kmodels.models.common.config import FrozenConfig
from kmodels.models.common.encoder.config import TextEncoderConfig
from kmodels.models.siglip import SigLIPTextConfig
from kmodels.models.vit import ViTConfig
from kmodels.models.vit.naflex.model import check_free


@dataclass(frozen=True)
class TwoTowersConfig(FrozenConfig):
    """Sizes of two towers; names as in keras-hub.

    Args:
        vision_encoder: fields of the `ViTConfig` of the images' tower.
        text_encoder: fields of the `CLIPTextConfig` or `SigLIPTextConfig` of the texts'.
        projection_dim: width to which both towers of a CLIP are projected; None for a SigLIP,
            whose towers give vectors of one width themselves.
        naflex: whether the images' tower takes patches of images of any aspect ratio, as
            `SigLIPNaFlexVisionEncoder` does; of a SigLIP alone.

    Raises:
        InputError: for sizes that do not fit together.
    """

    vision_encoder: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    projection_dim: int | None = None
    naflex: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "vision_encoder", self.vision.to_dict())
        object.__setattr__(self, "text_encoder", self.text.to_dict())
        if self.naflex:
            check_free(self.vision)
        if self.projection_dim is not None:
            check_whole("projection_dim", self.projection_dim)
            if not self.vision.use_class_token:
                raise InputError(
                    "use_class_token is False in vision_encoder; a CLIP pools images at that "
                    "token: give one, or a SigLIPBackbone"
                )
            return
        widths = self.vision.hidden_dim, self.text_encoder["projection_dim"]
        if widths[0] != widths[1]:
            raise InputError(
                f"the vision tower gives {widths[0]} numbers and the text tower {widths[1]}; give "
                f"text_encoder projection_dim={widths[0]}"
            )

    @property
    def projects(self) -> bool:
        """Whether the towers are projected, as in CLIP."""
        return self.projection_dim is not None

    @property
    def vision(self) -> ViTConfig:
        """The config of the images' tower."""
        return ViTConfig(**self.vision_encoder)

    @property
    def text(self) -> TextEncoderConfig:
        """The config of the texts' tower."""
        kind = CLIPTextConfig if self.projects else SigLIPTextConfig
        return kind(**self.text_encoder)

    @property
    def width(self) -> int:
        """Numbers of the vectors that images and texts share."""
        return self.projection_dim or self.vision.hidden_dim
