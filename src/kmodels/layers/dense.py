"""The linear layer."""

from typing import Any

from kmodels import initializers, ops
from kmodels.layers.base import Layer, Shape


class Dense(Layer):
    """x @ kernel + bias.

    Args:
        units: width of the output.
        use_bias: adds a bias.
        kernel_initializer: how the kernel is drawn; Glorot uniform as in the original ViT code.

    Call:
        x (..., in), compute dtype -> (..., units).

    Weights:
        kernel (in, units), bias (units,).
    """

    def __init__(
        self,
        units: int,
        use_bias: bool = True,
        kernel_initializer: initializers.Draw = initializers.glorot_uniform,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.units = units
        self.use_bias = use_bias
        self.draw = kernel_initializer
        self.bias = None

    def build(self, input_shape: Shape) -> None:
        """Makes the kernel and the bias."""
        self.kernel = self.add_parameter("kernel", (input_shape[-1], self.units), self.draw)
        if self.use_bias:
            self.bias = self.add_parameter("bias", (self.units,), initializers.zeros)

    def call(self, x: Any) -> Any:
        """(..., in) -> (..., units)."""
        return ops.dense(x, self.kernel, self.bias)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape with the last axis replaced by `units`."""
        return (*input_shape[:-1], self.units)
