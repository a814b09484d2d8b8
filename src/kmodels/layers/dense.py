"""The linear layer."""

from typing import Any

import keras

from kmodels import compat, initializers, ops, traced
from kmodels.errors import InputError
from kmodels.layers import quantized as quantizing
from kmodels.layers.base import Layer, Shape


class Dense(Layer):
    """x @ kernel + bias.

    Args:
        units: width of the output.
        use_bias: adds a bias.
        kernel_initializer: how the kernel is drawn; Glorot uniform as in the original ViT code.
        parts: how many equal parts of the inputs and of the outputs may lie on devices apart, None
            for as many as there are; heads, in a projection of attention.

    Call:
        x (..., in), compute dtype -> (..., units).

    Weights:
        kernel (in, units), bias (units,); a quantized layer has kernel_int8 or kernel_int4,
        kernel_scale and kernel_zero in place of the kernel, one with an adapter lora_a and lora_b.

    Attributes:
        merged: the adapter that `merge_lora` added to the kernel, or None.
    """

    def __init__(
        self,
        units: int,
        use_bias: bool = True,
        kernel_initializer: initializers.Draw = initializers.glorot_uniform,
        parts: tuple[int | None, int | None] = (None, None),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.units = units
        self.use_bias = use_bias
        self.draw = kernel_initializer
        self.parts = parts
        self.bias = None
        self.merged: Any = None
        self._adapter: Any = None
        self._quantized: quantizing.QuantizedKernel | None = None

    @property
    def adapter(self) -> Any:
        """What `enable_lora` put beside the kernel, or None."""
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: Any) -> None:
        self._adapter = adapter
        traced.changed()

    @property
    def quantized(self) -> quantizing.QuantizedKernel | None:
        """The kernel in few bits, or None."""
        return self._quantized

    @quantized.setter
    def quantized(self, kernel: quantizing.QuantizedKernel | None) -> None:
        self._quantized = kernel
        traced.changed()

    @property
    def variant(self) -> tuple[Any, ...]:
        """What decides how the layer computes beside its variables, see `kmodels.traced`."""
        return self._adapter, self._quantized

    def build(self, input_shape: Shape) -> None:
        """Makes the kernel and the bias."""
        self.input_dim = input_shape[-1]
        self.kernel = self.add_parameter(
            "kernel", (self.input_dim, self.units), self.draw, parts=self.parts
        )
        if self.use_bias:
            self.bias = self.add_parameter(
                "bias", (self.units,), initializers.zeros, parts=self.parts[1:]
            )

    def call(self, x: Any, training: bool = False) -> Any:
        """(..., in) -> (..., units)."""
        traced.note()
        if self.adapter is not None:
            return self.adapter(x, training)
        return self.linear(x, self.bias)

    def linear(self, x: Any, bias: Any) -> Any:
        """The layer without its adapter."""
        if self.quantized is not None:
            return self.quantized.dense(x, bias)
        return ops.dense(x, self.kernel, bias)

    @property
    def plain(self) -> bool:
        """Whether the layer is nothing but `x @ kernel + bias`."""
        return self.adapter is None and self.quantized is None

    def wide_kernel(self) -> Any:
        """The kernel (in, units) in float32, widened where it is quantized."""
        if self.quantized is not None:
            return self.quantized.wide()
        return keras.ops.cast(self.kernel, "float32")

    def quantize_kernel(self, mode: str) -> None:
        """Replaces the kernel by one of 8 or 4 bits, see `layers.quantized`.

        Raises:
            InputError: for a layer with an adapter, or a quantized one.
        """
        if self.adapter is not None or self.merged is not None:
            raise InputError(
                f"{self.path} has a LoRA adapter; quantize the base before enable_lora"
            )
        if self.quantized is not None:
            raise InputError(f"{self.path} is {self.quantized.mode} already; quantize a model once")
        values = keras.ops.convert_to_numpy(self.wide_kernel())
        quantizing.fill(self.to_quantized(mode), values)

    def to_quantized(self, mode: str) -> quantizing.QuantizedKernel:
        """Replaces the kernel by an empty quantized one, to be filled."""
        compat.detach(self, [self.kernel])
        with compat.changing(self):
            self.kernel = None
            self.quantized = quantizing.make(self, mode, self.input_dim, self.units)
        return self.quantized

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape with the last axis replaced by `units`."""
        return (*input_shape[:-1], self.units)
