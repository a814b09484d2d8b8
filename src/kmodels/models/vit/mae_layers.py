"""The layers of MAE: fixed positions, the patches that its encoder sees, and the decoder."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, LayerNorm
from kmodels.layers.base import Shape
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import Block

TEMPERATURE = 10000.0


def sines(grid: tuple[int, int], width: int, prefix: int = 0) -> np.ndarray:
    """Returns sines and cosines of the column and of the row of each patch.

    Args:
        grid: (rows, columns) of patches.
        width: width of the tokens, a multiple of four.
        prefix: tokens in front of the patches, whose rows are zeros.

    Returns:
        float32 (prefix + rows * columns, width): sines of the column, its cosines, sines of the
        row, its cosines, in the order of MAE's published weights.

    Raises:
        InputError: for a width that four does not divide.
    """
    if width % 4:
        raise InputError(f"a width of {width} has no fixed positions; give a multiple of 4")
    frequencies = TEMPERATURE ** (-np.arange(width // 4) / (width // 4))
    row, column = (axis.reshape(-1, 1) * frequencies for axis in np.indices(grid))
    parts = [np.sin(column), np.cos(column), np.sin(row), np.cos(row)]
    return np.pad(np.concatenate(parts, axis=1), ((prefix, 0), (0, 0))).astype("float32")


class Sines(keras.initializers.Initializer):
    """Draws nothing: gives `sines` for a variable (1, prefix + rows * columns, width).

    Args:
        grid: see `sines`, like the other.
        prefix: see there.
    """

    def __init__(self, grid: Sequence[int], prefix: int):
        self.grid = (int(grid[0]), int(grid[1]))
        self.prefix = prefix

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Returns the table."""
        table = sines(self.grid, shape[-1], self.prefix)
        return keras.ops.convert_to_tensor(table[None], dtype=dtype or keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {"grid": list(self.grid), "prefix": self.prefix}


@keras.saving.register_keras_serializable(package="kmodels")
class PatchMasking(Layer):
    """Leaves the tokens of seen patches, in a random order.

    Args:
        num_patches: patches of an image.
        num_seen: number of those that are seen.
        prefix: tokens in front of the patches, which all stay.

    Call:
        tokens (B, prefix + P, D) -> tokens (B, prefix + K, D), of the patches with the smallest
        `noise`, float (B, P); and their order, int32 (B, P): for each patch its place by noise.
        Without noise both are those of one order that is the same for all images and on every
        backend.
    """

    def __init__(self, num_patches: int, num_seen: int, prefix: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = False
        self.num_patches = num_patches
        self.num_seen = num_seen
        self.prefix = prefix
        drawn = np.random.Generator(np.random.Philox(0)).permutation(num_patches)
        self.usual_order = drawn.astype("int32")[None]

    def call(self, tokens: Tensor, noise: Tensor | None = None) -> Any:
        """(B, prefix + P, D) -> (B, prefix + K, D), (B, P)."""
        ops, prefix = keras.ops, self.prefix
        order = self.order(noise)
        if noise is None:
            order = ops.tile(order, (ops.shape(tokens)[0], 1))
        chosen = ops.argsort(order, axis=1)[:, : self.num_seen]
        seen = rows_of(tokens[:, prefix:], chosen)
        if prefix:
            seen = ops.concatenate([tokens[:, :prefix], seen], axis=1)
        return seen, order

    def order(self, noise: Tensor | None = None) -> Any:
        """Returns for each patch its place by noise, int32 (B, P), or without noise (1, P)."""
        if noise is None:
            return keras.ops.convert_to_tensor(self.usual_order)
        found = keras.ops.argsort(keras.ops.argsort(noise, axis=1), axis=1)
        return keras.ops.cast(found, "int32")

    def hidden(self, noise: Tensor | None = None) -> Any:
        """Returns 1 for each hidden patch and 0 for those seen, float32; shapes as of `order`."""
        return keras.ops.cast(self.order(noise) >= self.num_seen, "float32")

    def compute_output_spec(self, tokens: Tensor, noise: Tensor | None = None) -> Any:
        """Returns the specs of both."""
        batch, _, width = tokens.shape
        shape = (batch, self.prefix + self.num_seen, width)
        order = keras.KerasTensor((batch, self.num_patches), "int32")
        return keras.KerasTensor(shape, self.compute_dtype), order

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Any:
        """(B, prefix + K, D), (B, P)."""
        batch, _, width = input_shape
        return (batch, self.prefix + self.num_seen, width), (batch, self.num_patches)


def rows_of(x: Tensor, index: Tensor) -> Any:
    """Returns chosen rows of each example.

    Args:
        x: (B, T, D), where T is known.
        index: int (B, K), numbers from 0 to T - 1.

    Returns:
        (B, K, D).
    """
    ops, (length, width) = keras.ops, x.shape[1:]
    start = ops.expand_dims(ops.arange(ops.shape(x)[0], dtype="int32") * length, 1)
    found = ops.take(ops.reshape(x, (-1, width)), ops.cast(index, "int32") + start, axis=0)
    # Of no rows Keras makes an array of two dimensions on JAX.
    return ops.reshape(found, (ops.shape(x)[0], index.shape[1], width))


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
