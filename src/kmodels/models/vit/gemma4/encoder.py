"""The vision tower of Gemma 4, and how its patches are pooled by their places."""

import math
from typing import Any

import keras

from kmodels.core.errors import check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.models.common.hub_order import in_order
from kmodels.models.vit.gemma4.blocks import Gemma4VisionBlock, check_heads
from kmodels.models.vit.gemma4.patches import CHANNELS, PatchFeatures


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4VisionEncoder(PatchFeatures):
    """Patches to the features that stand among a text; arguments are keras-hub's.

    Patches are averaged in squares of `pool_size`, wherever they lie in the row.

    Args:
        patch_size: side of the square patches, in pixels.
        num_heads: heads of the queries.
        hidden_dim: width of the tower.
        num_layers: blocks.
        intermediate_dim: width of the MLP's gate.
        head_dim: width of each head.
        output_dim: width of the features, which is that of the text.
        num_key_value_heads: heads of keys and values; None for `num_heads`.
        pool_size: side of the squares of patches that become one feature.
        position_embedding_size: largest number of patches of a row or a column.
        rope_max_wavelength: base of the rotary embedding of columns and rows.
        layer_norm_epsilon: epsilon of every norm.
        dropout: on attention weights, in training.
        use_clipped_linears: bounds around every linear layer of a block, see `ClippedDense`.
        standardize: shifts and scales the features in front of the last norm.
        image_size: not used; keras-hub's encoder is told one.
        **kwargs: of `keras.layers.Layer`.

    Call:
        pixel_values (B, M, P, patch_size^2 * 3), floats from 0 to 1; pixel_position_ids
        (B, M, P, 2) int, column and row of each patch, -1 for padding; P a multiple of pool_size^2
        -> (B, M * N, output_dim) with N = P / pool_size^2, image by image, with what is padding
        behind all others.

    Weights:
        patch_embedding: kernel (patch, hidden_dim); position_embeddings (2,
        position_embedding_size, hidden_dim); block_<i>: see `Gemma4VisionBlock`; with `standardize`
        std_bias and std_scale (hidden_dim,), not trained; input_projection: kernel (hidden_dim,
        output_dim).

    Raises:
        InputError: for sizes that do not fit together.

    Source:
        Transformers' `Gemma4VisionModel`.
    """

    @in_order(
        *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers"),
        *("intermediate_dim", "head_dim", "output_dim", "num_key_value_heads", "pool_size"),
        *("position_embedding_size", "rope_max_wavelength", "layer_norm_epsilon", "dropout"),
        *("use_clipped_linears", "standardize", "dtype"),
    )
    def __init__(
        self,
        patch_size: int,
        num_heads: int,
        hidden_dim: int,
        num_layers: int,
        intermediate_dim: int,
        head_dim: int,
        output_dim: int,
        num_key_value_heads: int | None = None,
        pool_size: int = 3,
        position_embedding_size: int = 1024,
        rope_max_wavelength: float = 100.0,
        layer_norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        use_clipped_linears: bool = True,
        standardize: bool = False,
        image_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            hidden_dim,
            output_dim,
            patch_size,
            pool_size,
            position_embedding_size,
            layer_norm_epsilon,
            # Pixels are scaled before they are rounded to the compute dtype.
            autocast=False,
            **kwargs,
        )
        check_whole("num_layers", num_layers)
        check_whole("intermediate_dim", intermediate_dim)
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.intermediate_dim = intermediate_dim
        self.head_dim = head_dim
        self.num_key_value_heads = num_key_value_heads or num_heads
        self.rope_max_wavelength = rope_max_wavelength
        self.dropout = dropout
        self.use_clipped_linears = use_clipped_linears
        self.standardize = standardize
        self.image_size = image_size
        check_heads(num_heads, self.num_key_value_heads, head_dim)

    def build(self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape) -> None:
        """Makes the embedding of patches, the blocks, and the way into the text."""
        policy, width = self.dtype_policy, self.hidden_dim
        self.patch_embedding = Dense(width, use_bias=False, name="patch_embedding", dtype=policy)
        self.patch_embedding.build((None, self.patch_size**2 * CHANNELS))
        shape = (2, self.position_embedding_size, width)
        start = keras.initializers.RandomNormal(stddev=0.02)
        self.position_embeddings = self.add_parameter("position_embeddings", shape, start)
        self.blocks = [
            Gemma4VisionBlock(
                self.num_heads,
                self.num_key_value_heads,
                self.head_dim,
                self.intermediate_dim,
                self.rope_max_wavelength,
                self.layer_norm_epsilon,
                self.dropout,
                self.use_clipped_linears,
                name=f"block_{i}",
                dtype=policy,
            )
            for i in range(self.num_layers)
        ]
        for block in self.blocks:
            block.build((None, None, width), (None, None, 2))
        if self.standardize:
            self.std_bias = self.add_parameter("std_bias", (width,), "zeros", trainable=False)
            self.std_scale = self.add_parameter("std_scale", (width,), "ones", trainable=False)
        self.make_end()

    def call(self, pixel_values: Tensor, pixel_position_ids: Tensor, training: bool = False) -> Any:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * N, output_dim)."""
        images, patches = shape_of(pixel_values)[1:3]
        places = reshape(pixel_position_ids, (-1, patches, 2))
        pixels = reshape(pixel_values, (-1, patches, self.patch_size**2 * CHANNELS))
        x = self.patch_embedding(keras.ops.cast(2 * (pixels - 0.5), self.compute_dtype))
        table = keras.ops.cast(self.position_embeddings, self.compute_dtype)
        x = x + self.of_places(table, places)
        for block in self.blocks:
            x = block(x, places, training=training)
        x, is_there = pooled(x, places, self.pool_size)
        wide = "float64" if self.compute_dtype == "float64" else "float32"
        x = keras.ops.cast(x, wide) * math.sqrt(self.hidden_dim)
        if self.standardize:
            bias, scale = (keras.ops.cast(v, wide) for v in (self.std_bias, self.std_scale))
            x = (x - bias) * scale
        x = keras.ops.cast(x, self.compute_dtype)
        count = patches // self.patches_per_feature
        x = reshape(x, (-1, images, count, self.hidden_dim))
        return self.end(x, reshape(is_there, (-1, images, count)))

    @property
    def num_vision_tokens_per_image(self) -> int | None:
        """Features of a square image of `image_size`; None without it."""
        if self.image_size is None:
            return None
        return (self.image_size // self.patch_size // self.pool_size) ** 2

    @property
    def patches_per_feature(self) -> int:
        """Patches that become one feature."""
        return self.pool_size**2

    @property
    def side(self) -> int:
        """Side of the patches that come in, in pixels."""
        return self.patch_size


def pooled(x: Tensor, places: Tensor, size: int) -> tuple[Any, Any]:
    """Returns the mean of patches in squares, and which of these there are.

    Args:
        x: (B, P, D).
        places: (B, P, 2) int, column and row, -1 for padding.
        size: side of a square; its square divides P.

    Returns:
        (B, N, D) of x's dtype, computed in float32, and (B, N) bool, with N = P / size^2.
    """
    dtype = "float64" if keras.backend.standardize_dtype(x.dtype) == "float64" else "float32"
    there = keras.ops.all(places >= 0, axis=-1)
    held = keras.ops.maximum(places, 0)
    last = keras.ops.max(held[..., 0], axis=-1, keepdims=True, initial=0)
    columns = (last + 1) // size
    number = held[..., 0] // size + columns * (held[..., 1] // size)
    count = shape_of(x)[1] // size**2
    squares = keras.ops.arange(count, dtype="int32")
    share = keras.ops.logical_and(
        keras.ops.expand_dims(number, 1) == keras.ops.expand_dims(squares, -1),
        keras.ops.expand_dims(there, 1),
    )  # (B, N, P)
    weights = keras.ops.cast(share, dtype) / size**2
    y = keras.ops.matmul(weights, keras.ops.cast(x, dtype))
    return keras.ops.cast(y, x.dtype), keras.ops.any(share, axis=-1)
