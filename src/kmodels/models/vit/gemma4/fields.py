"""Read the vision fields of the config of a Gemma 4."""

from collections.abc import Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike
from kmodels.models.vit.gemma4.embedder import Gemma4VisionEmbedder
from kmodels.models.vit.gemma4.encoder import Gemma4VisionEncoder
from kmodels.models.vit.gemma4.patches import CHANNELS, PatchFeatures

# Settings of the layer that the text model's config says otherwise, or that are not of its sizes.
DERIVED = ("output_dim", "name", "trainable", "image_size")


class PatchFields:
    """The vision half of a config, a base of its dataclass.

    Attributes:
        vision_encoder: arguments of `Gemma4VisionEncoder` but `output_dim`, or of
            `Gemma4VisionEmbedder`, which has no "num_layers"; "dtype" is there for a policy other
            than the text's alone.
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
                "vision_encoder is missing; give the arguments of Gemma4VisionEncoder or of "
                "Gemma4VisionEmbedder, or take GemmaBackbone for text alone"
            )
        held = {name: x for name, x in self.vision_encoder.items() if name not in DERIVED}
        object.__setattr__(self, "vision_encoder", held)
        self.encoder()

    def encoder(self, name: str | None = None, dtype: DTypeLike = None) -> PatchFeatures:
        """Returns the layer that this config describes; a dtype of its own counts first."""
        held = {"name": name, "dtype": dtype, **(self.vision_encoder or {})}
        made = Gemma4VisionEncoder if "num_layers" in held else Gemma4VisionEmbedder
        return made(**held, output_dim=self.hidden_dim)

    @property
    def patch_width(self) -> int:
        """Numbers of each patch that comes in."""
        return self.encoder().side ** 2 * CHANNELS


def fit_preprocessor(given: dict[str, Any], config: PatchFields) -> dict[str, Any]:
    """Returns arguments whose image converter cuts patches of the size that the model takes."""
    encoder = config.encoder()
    held = {
        "patch_size": encoder.patch_size,
        "pooling_kernel_size": encoder.pool_size,
        "merge_patches": encoder.side != encoder.patch_size,
    }
    return {**given, "image_converter": {**(given.get("image_converter") or {}), **held}}
