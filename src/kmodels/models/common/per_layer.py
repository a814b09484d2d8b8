"""Per-layer embeddings: what each token's id and embedding add to each block, besides."""

import math
from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.layers import Dense, Embedding, Layer, RMSNorm
from kmodels.layers.base import Shape, reshape, shape_of


class _Table(Embedding):
    """The table of `PerLayerEmbedding`, which is not the vocabulary that adapters train rows of."""

    is_vocabulary = False


@keras.saving.register_keras_serializable(package="kmodels")
class PerLayerEmbedding(Layer):
    """A second table of tokens, with a part for each block, and a projection of the first one's.

    Args:
        input_dim: rows V of the table.
        num_layers: blocks.
        output_dim: width P of the part of each block.
        epsilon: epsilon of the norm.
        offset: is added to the scale of the norm.
        **kwargs: of `keras.layers.Layer`.

    Call:
        token_ids (B, T) int, x (B, T, D) what the model's own table gave -> a list with (B, T, P)
        for each block: (row * sqrt(P) + norm(projection(x) / sqrt(D))) / sqrt(2). As in
        `Embedding`, sqrt(P) is rounded to the compute dtype.

    Weights:
        table: embeddings (V, layers * P); model_projection: kernel (D, layers * P); norm:
        scale (P,).
    """

    def __init__(
        self,
        input_dim: int,
        num_layers: int,
        output_dim: int,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.num_layers = num_layers
        self.output_dim = output_dim
        self.epsilon = epsilon
        self.offset = offset
        policy, width = self.dtype_policy, num_layers * output_dim
        spread = keras.initializers.RandomNormal(stddev=output_dim**-0.5)
        self.table = _Table(input_dim, width, spread, scaled=False, name="table", dtype=policy)
        self.model_projection = Dense(width, use_bias=False, name="model_projection", dtype=policy)
        self.norm = RMSNorm(epsilon, offset=offset, name="norm", dtype=policy)

    def build(self, token_ids_shape: Shape, x_shape: Shape) -> None:
        """Makes the table for token ids, and the projection for the width of x."""
        self.table.build()
        self.model_projection.build(x_shape)
        self.norm.build((*x_shape[:-1], self.output_dim))

    def call(self, token_ids: Tensor, x: Tensor) -> Any:
        """(B, T), (B, T, D) -> a list of (B, T, P)."""
        batch, length, width = shape_of(x)
        shape = (batch, length, self.num_layers, self.output_dim)
        own = self.table(token_ids)
        own = own * keras.ops.convert_to_tensor(math.sqrt(self.output_dim), own.dtype)
        seen = self.norm(reshape(self.model_projection(x) * width**-0.5, shape))
        both = (seen + reshape(own, shape)) * 2**-0.5
        return list(keras.ops.unstack(both, self.num_layers, axis=2))

    def compute_output_shape(self, token_ids_shape: Shape, x_shape: Shape) -> list[Shape]:
        """(B, T, P) for each block."""
        return [(*x_shape[:-1], self.output_dim)] * self.num_layers
