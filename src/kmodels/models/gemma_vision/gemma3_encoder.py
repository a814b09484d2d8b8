"""The vision encoder of Gemma 3: SigLIP's tower, pooled and projected to the width of the text."""

from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, RMSNorm
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import ViTBackbone

# keras-hub's default.
POOL = 14


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3VisionEncoder(Layer):
    """Images to the features that stand among a text; arguments are keras-hub's.

    The patches of SigLIP's tower are averaged in squares, normalised by RMSNorm, and projected.

    Args:
        image_size: side of the square images, in pixels.
        patch_size: side of the square patches, in pixels.
        num_heads: attention heads of the tower.
        hidden_dim: width of the tower.
        num_layers: blocks of the tower.
        intermediate_dim: width of the tower's MLP.
        output_dim: width of the features, which is that of the text.
        pool_size: side of the squares of patches that become one feature.
        layer_norm_epsilon: epsilon of every norm.
        attention_dropout: on the attention weights of the tower, in training.
        **kwargs: of `keras.layers.Layer`.

    Call:
        images (B, M, image_size, image_size, 3), preprocessed floats -> (B, M * N, output_dim),
        image by image, with N = (image_size / patch_size / pool_size)^2.

    Weights:
        those of `ViTBackbone`; soft_embedding_norm: scale (hidden_dim,); input_projection: kernel
        (hidden_dim, output_dim).

    Raises:
        InputError: for sizes that do not divide one another.

    Source:
        Gemma Team 2025, arXiv:2503.19786, section 2.1; Transformers' `Gemma3MultiModalProjector`.
    """

    @in_order(
        *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers"),
        *("intermediate_dim", "output_dim", "pool_size", "layer_norm_epsilon", "dtype"),
    )
    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_heads: int,
        hidden_dim: int,
        num_layers: int,
        intermediate_dim: int,
        output_dim: int,
        pool_size: int = POOL,
        layer_norm_epsilon: float = 1e-6,
        attention_dropout: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_vision_tokens_per_image = tokens_per_image(image_size, patch_size, pool_size)
        self.image_size = image_size
        self.patch_size = patch_size
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.intermediate_dim = intermediate_dim
        self.output_dim = output_dim
        self.pool_size = pool_size
        self.layer_norm_epsilon = layer_norm_epsilon
        self.attention_dropout = attention_dropout

    @property
    def vit_config(self) -> ViTConfig:
        """The config of the tower."""
        return ViTConfig(
            image_shape=(self.image_size, self.image_size, 3),
            patch_size=self.patch_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            hidden_dim=self.hidden_dim,
            mlp_dim=self.intermediate_dim,
            layer_norm_epsilon=self.layer_norm_epsilon,
            attention_dropout=self.attention_dropout,
            approximate_gelu=True,
            use_class_token=False,
        )

    def build(self, input_shape: Shape) -> None:
        """Makes the tower, whose variables are named below this layer, the norm and the matrix."""
        policy = self.dtype_policy
        self.tower = ViTBackbone(**self.vit_config.to_dict(), name="tower", dtype=policy)
        self.soft_embedding_norm = RMSNorm(
            self.layer_norm_epsilon, offset=1.0, name="soft_embedding_norm", dtype=policy
        )
        self.soft_embedding_norm.build((None, None, self.hidden_dim))
        self.input_projection = Dense(
            self.output_dim, use_bias=False, name="input_projection", dtype=policy
        )
        self.input_projection.in_all_linear = False
        self.input_projection.build((None, None, self.hidden_dim))

    def call(self, images: Tensor, training: bool = False) -> Any:
        """(B, M, image_size, image_size, 3) -> (B, M * N, output_dim)."""
        count, side = shape_of(images)[1], self.image_size // self.patch_size // self.pool_size
        x = self.tower(reshape(images, (-1, *images.shape[2:])), training=training)
        pool = self.pool_size
        x = keras.ops.reshape(x, (-1, side, pool, side, pool, self.hidden_dim))
        x = keras.ops.reshape(keras.ops.mean(x, axis=(2, 4)), (-1, side * side, self.hidden_dim))
        x = self.input_projection(self.soft_embedding_norm(x))
        return reshape(x, (-1, count * side * side, self.output_dim))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, M * N, output_dim)."""
        batch, count = input_shape[:2]
        each = self.num_vision_tokens_per_image
        return (batch, None if count is None else count * each, self.output_dim)


def tokens_per_image(image_size: int, patch_size: int, pool_size: int = POOL, **_: object) -> int:
    """Returns the number of features that an encoder with these arguments gives of an image."""
    check_whole("pool_size", pool_size)
    check_whole("patch_size", patch_size)
    if image_size % (patch_size * pool_size):
        raise InputError(
            f"image_size is {image_size}; it must be a multiple of patch_size * pool_size, "
            f"{patch_size} * {pool_size}"
        )
    return (image_size // patch_size // pool_size) ** 2
