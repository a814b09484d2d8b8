"""Normalisation and the learned scale of a residual branch."""

from typing import Any

from kmodels import initializers, ops
from kmodels.layers.base import Layer, Shape


class LayerNorm(Layer):
    """Layer normalisation over the last axis, statistics in float32 (Ba et al. 2016).

    Args:
        epsilon: added to the variance.

    Call:
        x (..., D) -> (..., D), same dtype.

    Weights:
        scale (D,), bias (D,).
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs: Any):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape: Shape) -> None:
        """Makes scale and bias."""
        self.scale = self.add_parameter("scale", input_shape[-1:], initializers.ones)
        self.bias = self.add_parameter("bias", input_shape[-1:], initializers.zeros)

    def call(self, x: Any) -> Any:
        """(..., D) -> (..., D)."""
        return ops.layer_norm(x, self.scale, self.bias, epsilon=self.epsilon)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape


class RMSNorm(Layer):
    """Root mean square normalisation over the last axis, scaled by 1 + scale (Gemma).

    Args:
        epsilon: added to the mean square.

    Call:
        x (..., D) -> (..., D), same dtype; computed in float32.

    Weights:
        scale (D,), zeros at first.
    """

    def __init__(self, epsilon: float = 1e-6, **kwargs: Any):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape: Shape) -> None:
        """Makes the scale."""
        self.scale = self.add_parameter("scale", input_shape[-1:], initializers.zeros)

    def call(self, x: Any) -> Any:
        """(..., D) -> (..., D)."""
        return ops.rms_norm(x, self.scale, epsilon=self.epsilon)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape


class LayerScale(Layer):
    """Multiplies each channel of a residual branch by a learned scale (Touvron et al. 2021, eq. 5).

    Args:
        init: the scale to begin with.
    """

    def __init__(self, init: float = 1e-5, **kwargs: Any):
        super().__init__(**kwargs)
        self.init = init

    def build(self, input_shape: Shape) -> None:
        """Makes the scale."""
        self.scale = self.add_parameter("scale", input_shape[-1:], initializers.constant(self.init))

    def call(self, x: Any) -> Any:
        """(..., D) -> (..., D)."""
        return x * self.scale

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape
