"""The vision half of Gemma 4 12B, which has no encoder."""

from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Dense, LayerNorm
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.models.vit.gemma4.patches import CHANNELS, PatchFeatures

# Of PyTorch's LayerNorm, which transformers takes as it is.
EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4VisionEmbedder(PatchFeatures):
    """Patches to the features that stand among a text, by one dense layer between norms.

    Args:
        hidden_dim: width behind the dense layer.
        output_dim: width of the features, which is that of the text.
        patch_size: side of the square patches of which `pool_size` squared make one here.
        pool_size: see there; 48 pixels are a side of the patches that come in, by default.
        position_embedding_size: largest number of patches of a row or a column.
        layer_norm_epsilon: epsilon of the RMSNorm at the end.
        **kwargs: of `keras.layers.Layer`.

    Call:
        pixel_values (B, M, P, (patch_size * pool_size)^2 * 3), floats from 0 to 1;
        pixel_position_ids (B, M, P, 2) int, column and row of each patch, -1 for padding ->
        (B, M * P, output_dim), image by image, with what is padding behind all others.

    Weights:
        patch_norm: scale, bias (patch,); patch_embedding: kernel (patch, hidden_dim), bias;
        patch_embedding_norm, position_norm: scale, bias (hidden_dim,); position_embeddings
        (position_embedding_size, 2, hidden_dim); input_projection: kernel (hidden_dim, output_dim).

    Raises:
        InputError: for sizes that are no whole numbers above 0.

    Source:
        Transformers' `Gemma4UnifiedVisionEmbedder`.
    """

    def __init__(
        self,
        hidden_dim: int,
        output_dim: int,
        patch_size: int = 16,
        pool_size: int = 3,
        position_embedding_size: int = 1120,
        layer_norm_epsilon: float = 1e-6,
        **kwargs: Any,
    ):
        super().__init__(
            hidden_dim,
            output_dim,
            patch_size,
            pool_size,
            position_embedding_size,
            layer_norm_epsilon,
            **kwargs,
        )

    def build(self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape) -> None:
        """Makes the norms, the dense layer, the positions and the matrix."""
        policy, width = self.dtype_policy, self.hidden_dim
        inner = (self.patch_size * self.pool_size) ** 2 * CHANNELS
        self.patch_norm = LayerNorm(EPSILON, name="patch_norm", dtype=policy)
        self.patch_norm.build((None, inner))
        self.patch_embedding = Dense(width, name="patch_embedding", dtype=policy)
        self.patch_embedding.build((None, inner))
        self.patch_embedding_norm = LayerNorm(EPSILON, name="patch_embedding_norm", dtype=policy)
        self.patch_embedding_norm.build((None, width))
        shape = (self.position_embedding_size, 2, width)
        self.position_embeddings = self.add_parameter("position_embeddings", shape, "zeros")
        self.position_norm = LayerNorm(EPSILON, name="position_norm", dtype=policy)
        self.position_norm.build((None, width))
        self.make_end()

    def call(self, pixel_values: Tensor, pixel_position_ids: Tensor, training: bool = False) -> Any:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * P, output_dim)."""
        images, patches = shape_of(pixel_values)[1:3]
        pixels = reshape(pixel_values, (-1, images * patches, pixel_values.shape[-1]))
        places = reshape(pixel_position_ids, (-1, images * patches, 2))
        x = self.patch_embedding_norm(self.patch_embedding(self.patch_norm(pixels)))
        table = keras.ops.convert_to_tensor(self.position_embeddings)
        x = self.position_norm(x + self.of_places(table, places, is_by_place=True))
        x = reshape(x, (-1, images, patches, self.hidden_dim))
        return self.end(x, keras.ops.all(pixel_position_ids >= 0, axis=-1))
