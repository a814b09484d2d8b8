"""Linear layers: `Dense`, and `GroupedDense` with a kernel for each group of rows."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels import ops
from kmodels.core import traced
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import (
    ActivationLike,
    ConstraintLike,
    InitializerLike,
    RegularizerLike,
    Tensor,
)
from kmodels.layers import initializers
from kmodels.layers.adapter import AdaptableLayer, LoraSettings, warn_of_rank
from kmodels.layers.base import Layer, Shape, arguments
from kmodels.layers.quantized import Quantization


class WithKernel(Layer):
    """A layer with kernels and biases, and Keras' arguments for them.

    Args:
        kernel_initializer: a name, a config or an object, as Keras takes it; those of Keras without
            a seed of their own are drawn from kmodels' streams, equal on every backend.
        bias_initializer: initializer of the biases.
        kernel_regularizer: adds to the loss; None for none.
        bias_regularizer: regularizer of the biases.
        kernel_constraint: applied after each step; None for none.
        bias_constraint: constraint of the biases.
    """

    def __init__(
        self,
        kernel_initializer: InitializerLike = "glorot_uniform",
        bias_initializer: InitializerLike = "zeros",
        kernel_regularizer: RegularizerLike = None,
        bias_regularizer: RegularizerLike = None,
        kernel_constraint: ConstraintLike = None,
        bias_constraint: ConstraintLike = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)

    @property
    def kernel_settings(self) -> dict[str, Any]:
        """The arguments of this class, for the layers below."""
        return {name: getattr(self, name) for name in arguments(WithKernel)}


@keras.saving.register_keras_serializable(package="kmodels")
class Dense(AdaptableLayer, WithKernel):
    """activation(x @ kernel + bias), with the arguments of `keras.layers.Dense`.

    Args:
        units: width of the output.
        activation: a name or a function; None for none.
        use_bias: adds a bias.
        kernel_initializer: Glorot uniform as in the original ViT code; this and the following as
            in `keras.layers.Dense`.
        bias_initializer: zeros.
        kernel_regularizer: adds to the loss.
        bias_regularizer: regularizer of the bias.
        activity_regularizer: regularizer of the output.
        kernel_constraint: applied after each step.
        bias_constraint: constraint of the bias.
        shard_granularity: into how many equal parts the inputs and the outputs may be sharded,
            None for as many as there are; heads, in a projection of attention.

    Call:
        x (..., in), compute dtype -> (..., units).

    Weights:
        kernel (in, units), bias (units,); a quantized layer has the variables of
        `quantized.Quantization.shapes` in place of the kernel, one with an adapter lora_a and
        lora_b.

    Attributes:
        in_all_linear: whether LoRA's "all-linear" includes the layer; False if transformers has a
            bare parameter there, which PEFT does not adapt as a linear layer.

    Raises:
        InputError: for `units` that are no whole number above 0.
    """

    kernel: keras.Variable  # None in a quantized layer, or a trained copy of it
    in_all_linear = True

    def __init__(
        self,
        units: int,
        activation: ActivationLike = None,
        use_bias: bool = True,
        kernel_initializer: InitializerLike = "glorot_uniform",
        bias_initializer: InitializerLike = "zeros",
        kernel_regularizer: RegularizerLike = None,
        bias_regularizer: RegularizerLike = None,
        activity_regularizer: RegularizerLike = None,
        kernel_constraint: ConstraintLike = None,
        bias_constraint: ConstraintLike = None,
        shard_granularity: Sequence[int | None] = (None, None),
        **kwargs: Any,
    ):
        super().__init__(
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            **kwargs,
        )
        check_whole("units", units)
        self.units = units
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.shard_granularity = tuple(shard_granularity)
        self.bias = None

    def build(self, input_shape: Shape) -> None:
        """Makes the kernel and the bias."""
        self.input_dim = input_shape[-1]
        shape, granularity = (self.input_dim, self.units), self.shard_granularity
        self.kernel = self.add_parameter("kernel", shape, self.kernel_initializer, granularity)
        if self.use_bias:
            shape, granularity = shape[1:], granularity[1:]
            self.bias = self.add_parameter("bias", shape, self.bias_initializer, granularity)

    def call(self, x: Tensor, training: bool = False) -> Any:
        """(..., in) -> (..., units)."""
        traced.note()
        if self._adapter is not None:
            y = self._adapter(x, training)
        else:
            y = self.linear(x, self.bias)
        return y if self.activation is keras.activations.linear else self.activation(y)

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        """Returns the layer without its adapter and its activation."""
        if self._quantized is not None and self.kernel is None:
            return self._quantized.dense(x, bias)
        return ops.dense(x, self.kernel, bias)

    @property
    def plain(self) -> bool:
        """True if the layer is nothing but `x @ kernel + bias`."""
        linear = self.activation is keras.activations.linear
        return linear and self.adapter is None and self.quantized is None

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: InitializerLike = "he_uniform",
        b_initializer: InitializerLike = "zeros",
    ) -> None:
        """Freezes the kernel and adds a LoRA adapter, as Keras' Dense does.

        Args:
            rank: rank of the matrices, (in, rank) and (rank, units).
            lora_alpha: scales their product by lora_alpha / rank; None for a scale of 1.
            a_initializer: initializer of the first matrix, as Keras takes it.
            b_initializer: initializer of the second.

        Raises:
            InputError: for a layer that is not built, or that has an adapter or a kernel
                constraint, or for a rank out of range.
        """
        if not self.built:
            raise InputError(f"{self.name} is not built; call it, or build, before enable_lora")
        if self.adapter is not None or self.merged is not None:
            raise InputError(f"{self.path} has an adapter already; lora is enabled once per layer")
        if self.kernel_constraint is not None:
            raise InputError(f"{self.path} has a kernel_constraint, which LoRA would pass by")
        settings = LoraSettings(rank, lora_alpha, targets=(self.name,))
        warn_of_rank([self], rank, stacklevel=3)
        adapter = self.add_adapter(settings)
        if self.kernel is not None:
            self.kernel.trainable = False
        for variable, initializer in zip(
            adapter.variables, (a_initializer, b_initializer), strict=True
        ):
            keyed = initializers.keyed(initializer, variable.path)
            variable.assign(keyed(tuple(variable.shape), "float32"))

    def quantize(
        self, mode: str | None = None, type_check: bool = True, config: Any = None
    ) -> None:
        """Quantizes the kernel as part of a `keras.Model`, whose `quantize` calls it.

        Args:
            mode: "int8" or "int4".
            type_check: Keras' argument; without effect.
            config: see `kmodels.models.GemmaCausalLM.quantize`.

        Raises:
            InputError: for another mode or config, or a quantized layer.
        """
        self.quantize_kernel(Quantization.of_keras(mode, config))


@keras.saving.register_keras_serializable(package="kmodels")
class GroupedDense(AdaptableLayer, Layer):
    """`x[i] @ kernel[g]` for the rows i of each group g, without biases.

    Args:
        groups: number of kernels G.
        units: width of the output.
        kernel_initializer: initializer; None for Glorot uniform of each kernel.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (N, in), sizes (G,) int32 -> (N, units): the first sizes[0] rows are those of group 0, and
        so on.

    Weights:
        kernel (G, in, units); a quantized layer has the variables of
        `quantized.Quantization.shapes` in its place, one with an adapter lora_a and lora_b too.

    Raises:
        InputError: for `groups` or `units` that are no whole number above 0.
    """

    kernel: keras.Variable
    bias = None  # as in `Dense`

    def __init__(
        self,
        groups: int,
        units: int,
        kernel_initializer: InitializerLike = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_whole("groups", groups)
        check_whole("units", units)
        self.groups = groups
        self.units = units
        is_given = kernel_initializer is not None
        self.kernel_initializer = keras.initializers.get(kernel_initializer) if is_given else None
        self.shard_granularity = (None, None, None)

    def build(self, input_shape: Shape, *_: object) -> None:
        """Makes the kernels."""
        self.input_dim = input_shape[-1]
        drawn = self.kernel_initializer
        if drawn is None:
            # Keras counts the first axis as the window of a convolution.
            drawn = keras.initializers.VarianceScaling(self.groups, "fan_avg", "uniform")
        self.kernel = self.add_parameter("kernel", (self.groups, self.input_dim, self.units), drawn)

    def call(self, x: Tensor, sizes: Tensor, training: bool = False) -> Any:
        """(N, in), (G,) -> (N, units)."""
        traced.note()
        if self._adapter is not None:
            return self._adapter.grouped(x, sizes)
        return self.linear(x, sizes)

    def linear(self, x: Tensor, sizes: Tensor) -> Any:
        """Returns the layer without its adapter."""
        if self._quantized is not None and self.kernel is None:
            return self._quantized.dense(x, None, sizes)
        return ops.grouped_dense(x, self.kernel, sizes)
