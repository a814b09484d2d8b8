"""SigLIP's text tower, in keras-hub's words."""

from typing import Any

import keras

from kmodels.core.types import DTypeLike, Tensor
from kmodels.layers import Dense
from kmodels.models.common.encoder.block import EncoderBlock
from kmodels.models.common.encoder.text_encoder import TextEncoderBackbone
from kmodels.models.siglip.config import SigLIPTextConfig
from kmodels.models.siglip.weights import peft


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTextBlock(EncoderBlock):
    """`EncoderBlock` of a `SigLIPTextConfig`."""

    config_class = SigLIPTextConfig


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPTextEncoder(TextEncoderBackbone):
    """SigLIP's text tower with its head; calls are `TextEncoderBackbone`'s.

    Each token sees all others, those that pad the row included: the tower is trained so, on rows
    of one length. What stands for a text is its last place, through a linear layer. Tokens where a
    "padding_mask" is 0 are not seen, which is another model than the trained one.

    Args:
        vocabulary_size: as of `SigLIPTextConfig`, like all that follow.
        embedding_dim: see there.
        hidden_dim: see there.
        num_layers: see there.
        num_heads: see there.
        intermediate_dim: see there.
        intermediate_activation: see there.
        layer_norm_epsilon: see there.
        max_sequence_length: see there.
        projection_dim: see there.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        **variants: the other fields of the config.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool}, or token ids alone ->
        (B, projection_dim).

    Source:
        Zhai et al. 2023, arXiv:2303.15343; Transformers' `modeling_siglip`.
    """

    config_class = SigLIPTextConfig
    block_class = SigLIPTextBlock
    family = "siglip"
    peft_names = staticmethod(peft.names)

    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int,
        hidden_dim: int,
        num_layers: int,
        num_heads: int,
        intermediate_dim: int,
        intermediate_activation: str = "gelu_approximate",
        layer_norm_epsilon: float = 1e-6,
        max_sequence_length: int = 64,
        projection_dim: int | None = None,
        dtype: DTypeLike = None,
        name: str | None = None,
        **variants: Any,
    ):
        super().__init__(
            vocabulary_size,
            embedding_dim,
            hidden_dim,
            num_layers,
            num_heads,
            intermediate_dim,
            intermediate_activation,
            layer_norm_epsilon=layer_norm_epsilon,
            max_sequence_length=max_sequence_length,
            projection_dim=projection_dim,
            dtype=dtype,
            name=name,
            **variants,
        )

    @staticmethod
    def finish(hidden: Tensor, config: SigLIPTextConfig, policy: keras.DTypePolicy) -> Any:
        """Returns the head's numbers of the last place: (B, T, D) -> (B, projection_dim)."""
        width = config.projection_dim or config.hidden_dim
        return Dense(width, name="head", dtype=policy)(hidden[:, -1])

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns what the model gave, which is pooled: (B, P) -> (B, P)."""
        return hidden
