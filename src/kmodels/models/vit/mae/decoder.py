"""The decoder of MAE: from the tokens of the seen patches to the pixels of all."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, LayerNorm
from kmodels.layers.base import Shape
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.mae.masking import rows_of
from kmodels.models.vit.mae.positions import Sines
from kmodels.models.vit.model import Block


@keras.saving.register_keras_serializable(package="kmodels")
class MAEDecoder(Layer):
    """Puts a learned token in place of each hidden patch, and says the pixels of all patches.

    Args:
        config: sizes of the decoder; images, patches, and the tokens in front of the patches as of
            the encoder.

    Call:
        tokens (B, prefix + K, E), as the encoder gives them for the seen patches; order int32
        (B, P), for each patch its place among the seen ones followed by the hidden ones, or None
        where all are there in their own order -> (B, P, patch * patch * C), pixels in the order
        (row, column, channel).

    Weights:
        embed, mask_token (1, 1, D), block_<i>, norm, prediction; position_embedding
        (1, prefix + P, D), which is not trained.

    Source:
        He et al. 2022 (arXiv:2111.06377), section 3. Parity: transformers'
        `ViTMAEForPreTraining`.
    """

    def __init__(self, config: ViTConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.supports_masking = False
        self.config = config = ViTConfig.of(config)
        self.embed = Dense(config.hidden_dim, name="embed", dtype=policy)
        self.blocks = [
            Block(config, name=f"block_{i}", dtype=policy) for i in range(config.num_layers)
        ]
        self.norm = LayerNorm(config.layer_norm_epsilon, name="norm", dtype=policy)
        pixels = config.patch_size**2 * config.image_shape[2]
        self.prediction = Dense(pixels, name="prediction", dtype=policy)

    def build(self, input_shape: Shape) -> None:
        """Builds every part for the width of the encoder."""
        config = self.config
        shape = (1, 1, config.hidden_dim)
        normal = keras.initializers.RandomNormal(stddev=0.02)
        self.mask_token = self.add_parameter("mask_token", shape, normal)
        prefix, (height, width) = config.num_prefix_tokens, config.grid
        self.position_embedding = self.add_parameter(
            "position_embedding",
            (1, prefix + height * width, config.hidden_dim),
            Sines(config.grid, prefix),
            trainable=False,
        )
        self.embed.build(input_shape)
        inner = (*input_shape[:-1], config.hidden_dim)
        for part in (*self.blocks, self.norm, self.prediction):
            part.build(inner)

    def call(self, tokens: Tensor, order: Tensor | None = None, training: bool = False) -> Any:
        """(B, prefix + K, E) -> (B, P, patch * patch * C)."""
        ops, prefix = keras.ops, self.config.num_prefix_tokens
        x = self.embed(tokens)
        if order is not None:
            seen = x[:, prefix:]
            # Under autocast the token has the dtype of the layer.
            hidden = ops.cast(self.mask_token, x.dtype)
            number = order.shape[1] - seen.shape[1]
            hidden = ops.tile(hidden, (ops.shape(x)[0], number, 1))
            patches = rows_of(ops.concatenate([seen, hidden], axis=1), order)
            x = ops.concatenate([x[:, :prefix], patches], axis=1)
        x = x + ops.cast(self.position_embedding, x.dtype)
        for block in self.blocks:
            x = block(x, training=training)
        return self.prediction(self.norm(x)[:, prefix:])

    def compute_output_shape(self, tokens_shape: Shape, order_shape: Shape | None = None) -> Shape:
        """(B, P, patch * patch * C)."""
        height, width = self.config.grid
        return (tokens_shape[0], height * width, self.prediction.units)
