"""The head of two towers: cosine similarities with a learned scale, and perhaps a bias."""

from typing import Any

import keras
from keras import ops

from kmodels.core.types import Tensor
from kmodels.layers import Layer
from kmodels.layers.base import Shape
from kmodels.ops._wide import wide

# Squares of lengths below this are taken for it, so that a vector of zeros has a gradient.
SMALLEST = 1e-24


@keras.saving.register_keras_serializable(package="kmodels")
class SimilarityHead(Layer):
    """Vectors of images and texts to the logits of all pairs.

    Args:
        use_bias: adds a learned number to all logits.
        first_scale: logarithm of what cosines are multiplied by, before training.
        first_bias: the number that is added, before training.
        **kwargs: of `keras.layers.Layer`.

    Call:
        image_embeds (B, P), text_embeds (N, P) -> vision_logits (B, N), text_logits (N, B), in
        float32 at least whatever the dtype of the vectors.

    Weights:
        logit_scale (), a logarithm; with `use_bias` logit_bias ().
    """

    def __init__(
        self,
        use_bias: bool = False,
        first_scale: float = 0.0,
        first_bias: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.use_bias = use_bias
        self.first_scale = first_scale
        self.first_bias = first_bias

    def build(self, image_embeds_shape: Shape, text_embeds_shape: Shape) -> None:
        """Makes the scale and the bias."""
        first = keras.initializers.Constant
        self.logit_scale = self.add_parameter("logit_scale", (), first(self.first_scale))
        self.logit_bias = None
        if self.use_bias:
            self.logit_bias = self.add_parameter("logit_bias", (), first(self.first_bias))

    def call(self, image_embeds: Tensor, text_embeds: Tensor) -> Any:
        """(B, P), (N, P) -> (B, N), (N, B)."""
        images, texts = unit_length(image_embeds), unit_length(text_embeds)
        # einsum, since `matmul` rounds float64 on some backends.
        logits = ops.einsum("ip,jp->ij", images, texts)
        logits = logits * ops.exp(ops.cast(self.logit_scale, logits.dtype))
        if self.logit_bias is not None:
            logits = logits + ops.cast(self.logit_bias, logits.dtype)
        return logits, ops.transpose(logits)

    def compute_output_spec(
        self, image_embeds: keras.KerasTensor, text_embeds: keras.KerasTensor
    ) -> tuple[keras.KerasTensor, keras.KerasTensor]:
        """Returns shapes and dtypes of both."""
        images, texts, dtype = image_embeds.shape[0], text_embeds.shape[0], wide(image_embeds)
        return keras.KerasTensor((images, texts), dtype), keras.KerasTensor((texts, images), dtype)


def unit_length(x: Tensor) -> Any:
    """Returns vectors (..., P) divided by their lengths, in float32 at least."""
    x = ops.cast(x, wide(x))
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(ops.maximum(squares, SMALLEST))
