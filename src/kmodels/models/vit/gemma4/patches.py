"""Share the positions and the projection of patches between both vision halves of Gemma 4."""

from typing import Any

import keras

from kmodels.core.errors import check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, RMSNorm
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.models.common.inputs import Reordered, TokensFirst

CHANNELS = 3


class PatchFeatures(Layer):
    """A layer of patches with their places to the features that stand among a text.

    Args:
        hidden_dim: width of the patches on their way.
        output_dim: width of the features, which is that of the text.
        patch_size: side of the square patches, in pixels.
        pool_size: side of the squares of patches that become one feature.
        position_embedding_size: largest number of patches of a row or a column.
        layer_norm_epsilon: epsilon of every RMSNorm.
        **kwargs: of `keras.layers.Layer`.
    """

    def __init__(
        self,
        hidden_dim: int,
        output_dim: int,
        patch_size: int,
        pool_size: int,
        position_embedding_size: int,
        layer_norm_epsilon: float,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sizes = {"patch_size": patch_size, "pool_size": pool_size, "hidden_dim": hidden_dim}
        for name, size in {**sizes, "position_embedding_size": position_embedding_size}.items():
            check_whole(name, size)
        self.hidden_dim = hidden_dim
        self.output_dim = output_dim
        self.patch_size = patch_size
        self.pool_size = pool_size
        self.position_embedding_size = position_embedding_size
        self.layer_norm_epsilon = layer_norm_epsilon

    def make_end(self) -> None:
        """Makes the norm without a scale and the matrix in front of the text."""
        policy, shape = self.dtype_policy, (None, None, self.hidden_dim)
        settings = {"use_scale": False, "name": "soft_embedding_norm", "dtype": policy}
        self.soft_embedding_norm = RMSNorm(self.layer_norm_epsilon, **settings)
        self.soft_embedding_norm.build(shape)
        self.input_projection = Dense(
            self.output_dim, use_bias=False, name="input_projection", dtype=policy
        )
        self.input_projection.build(shape)
        self.order, self.move = TokensFirst(), Reordered()

    def end(self, x: Tensor, is_there: Tensor) -> Any:
        """Returns the features of a row, those of padding behind all others.

        Args:
            x: (B, M, N, hidden_dim).
            is_there: (B, M, N) bool, False for padding.
        """
        images, features = shape_of(x)[1:3]
        x = reshape(x, (-1, images * features, self.hidden_dim))
        x = self.input_projection(self.soft_embedding_norm(x))
        mask = reshape(keras.ops.cast(is_there, "int32"), (-1, images * features))
        front, _ = self.order(mask)
        return self.move(x, front)

    def of_places(self, table: Tensor, places: Tensor, is_by_place: bool = False) -> Any:
        """Returns the sum of the learned vectors of columns and rows.

        Args:
            table: (2, size, D), columns first, or by place (size, 2, D).
            places: (..., 2) int, column and row, -1 for padding, whose vector is 0.
            is_by_place: whether the table has places first.

        Returns:
            (..., D).
        """
        size = self.position_embedding_size
        step, firsts = (2, [0, 1]) if is_by_place else (1, [0, size])
        ids = keras.ops.maximum(places, 0) * step
        ids += keras.ops.convert_to_tensor(firsts, dtype=places.dtype)
        found = keras.ops.take(keras.ops.reshape(table, (-1, table.shape[-1])), ids, axis=0)
        there = keras.ops.expand_dims(keras.ops.cast(places >= 0, found.dtype), -1)
        return keras.ops.sum(found * there, axis=-2)

    def compute_output_shape(
        self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape
    ) -> Shape:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * N, output_dim)."""
        batch, images, patches = pixel_values_shape[:3]
        if images is None or patches is None:
            return batch, None, self.output_dim
        return batch, images * (patches // self.patches_per_feature), self.output_dim

    @property
    def side(self) -> int:
        """Side of the patches that come in, in pixels."""
        return self.patch_size * self.pool_size

    @property
    def patches_per_feature(self) -> int:
        """Patches that become one feature."""
        return 1
