"""The configuration of a SigLIP text tower, validated in one place."""

from dataclasses import dataclass

from kmodels.core.errors import check_whole
from kmodels.models.common.encoder.config import TextEncoderConfig


@dataclass(frozen=True)
class SigLIPTextConfig(TextEncoderConfig):
    """Sizes of a SigLIP text tower; names as in keras-hub.

    Args:
        vocabulary_size: like all that is not listed, as of `TextEncoderConfig`.
        projection_dim: width of what stands for a text; `hidden_dim` by default.

    Raises:
        InputError: for sizes that do not fit together.
    """

    intermediate_activation: str = "gelu_approximate"
    max_sequence_length: int = 64
    layer_norm_epsilon: float = 1e-6
    projection_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projection_dim is None:
            object.__setattr__(self, "projection_dim", self.hidden_dim)
        check_whole("projection_dim", self.projection_dim)
