"""The patches of each image that MAE's encoder sees."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.types import Tensor
from kmodels.layers import Layer


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
