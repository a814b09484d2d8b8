"""Normalisation and the learned scale of a residual branch."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import InputError
from kmodels.core.types import ConstraintLike, InitializerLike, RegularizerLike, Tensor
from kmodels.layers.base import Layer, Shape


class _Scaled(Layer):
    """A layer that multiplies each channel by a learned number.

    Args:
        scale_initializer: a name, a config or an object, as Keras takes it.
        scale_regularizer: adds to the loss; None for nothing.
        scale_constraint: applied after each step; None for none.
    """

    def __init__(
        self,
        scale_initializer: InitializerLike,
        scale_regularizer: RegularizerLike = None,
        scale_constraint: ConstraintLike = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.scale_initializer = keras.initializers.get(scale_initializer)
        self.scale_regularizer = keras.regularizers.get(scale_regularizer)
        self.scale_constraint = keras.constraints.get(scale_constraint)

    def build(self, input_shape: Shape) -> None:
        """Makes the scale."""
        self.scale = self.add_parameter("scale", input_shape[-1:], self.scale_initializer)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape


@keras.saving.register_keras_serializable(package="kmodels")
class LayerNorm(_Scaled):
    """Layer normalisation over the last axis, statistics in float32 (Ba et al. 2016).

    Args:
        epsilon: added to the variance.
        axis: the last one, as -1 or by its number, alone or in a list.
        scale_initializer: ones; this and the following as in `keras.layers.LayerNormalization`,
            which uses the names gamma and beta.
        bias_initializer: zeros.
        scale_regularizer: adds to the loss.
        bias_regularizer: regularizer of the bias.
        scale_constraint: applied after each step.
        bias_constraint: constraint of the bias.

    Call:
        x (..., D) -> (..., D), same dtype.

    Weights:
        scale (D,), bias (D,).

    Raises:
        InputError: for another axis, or an epsilon below 0.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        axis: int | Sequence[int] = -1,
        scale_initializer: InitializerLike = "ones",
        bias_initializer: InitializerLike = "zeros",
        scale_regularizer: RegularizerLike = None,
        bias_regularizer: RegularizerLike = None,
        scale_constraint: ConstraintLike = None,
        bias_constraint: ConstraintLike = None,
        **kwargs: Any,
    ):
        super().__init__(scale_initializer, scale_regularizer, scale_constraint, **kwargs)
        check_epsilon(epsilon)
        self.epsilon = epsilon
        self.axis = axis
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)

    def build(self, input_shape: Shape) -> None:
        """Makes scale and bias."""
        check_axis(self.axis, input_shape)
        super().build(input_shape)
        self.bias = self.add_parameter("bias", input_shape[-1:], self.bias_initializer)

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        return ops.layer_norm(x, self.scale, self.bias, epsilon=self.epsilon)


@keras.saving.register_keras_serializable(package="kmodels")
class RMSNorm(_Scaled):
    """Root mean square normalisation over the last axis, scaled by offset + scale.

    Args:
        epsilon: added to the mean square.
        axis: the last one, as -1 or by its number, alone or in a list.
        scale_initializer: None for an initial factor of 1: zeros, or ones without offset.
        scale_regularizer: adds to the loss.
        scale_constraint: applied after each step.
        offset: 1 as in Gemma, or 0 for a scale that is the factor itself, as in most decoders.
        use_scale: False for a norm without a scale.

    Call:
        x (..., D) -> (..., D), same dtype; computed in float32.

    Weights:
        scale (D,), initially zeros, or ones if `offset` is 0. Without `use_scale` none.

    Raises:
        InputError: for another axis, or an epsilon below 0.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        axis: int | Sequence[int] = -1,
        scale_initializer: InitializerLike = None,
        scale_regularizer: RegularizerLike = None,
        scale_constraint: ConstraintLike = None,
        offset: float = 1.0,
        use_scale: bool = True,
        **kwargs: Any,
    ):
        if scale_initializer is None:
            scale_initializer = "zeros" if offset else "ones"
        super().__init__(scale_initializer, scale_regularizer, scale_constraint, **kwargs)
        check_epsilon(epsilon)
        self.epsilon = epsilon
        self.offset = offset
        self.axis = axis
        self.use_scale = use_scale
        self.scale = None

    def build(self, input_shape: Shape) -> None:
        """Makes the scale, if there is to be one."""
        check_axis(self.axis, input_shape)
        if self.use_scale:
            super().build(input_shape)

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        return ops.rms_norm(x, self.scale, epsilon=self.epsilon, offset=self.offset)


@keras.saving.register_keras_serializable(package="kmodels")
class LayerScale(_Scaled):
    """Multiplies each channel of a residual branch by a learned scale (Touvron et al. 2021, eq. 5).

    Args:
        init: the scale to begin with.
        scale_regularizer: adds to the loss.
        scale_constraint: applied after each step.

    Call:
        x (..., D) -> (..., D), same dtype.

    Weights:
        scale (D,).
    """

    def __init__(
        self,
        init: float = 1e-5,
        scale_regularizer: RegularizerLike = None,
        scale_constraint: ConstraintLike = None,
        **kwargs: Any,
    ):
        start = keras.initializers.Constant(init)
        super().__init__(start, scale_regularizer, scale_constraint, **kwargs)
        self.init = init

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again, as plain values."""
        config = super().get_config()
        del config["scale_initializer"]  # It follows from `init`.
        return config

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        return x * self.scale


def check_epsilon(epsilon: float) -> None:
    """Raises `InputError` for an epsilon below 0."""
    if epsilon < 0:
        raise InputError(f"epsilon is {epsilon!r}; give a number from 0, such as 1e-6")


def check_axis(axis: int | Sequence[int], input_shape: Shape) -> None:
    """Raises `InputError` for all but the last axis."""
    if ([axis] if isinstance(axis, int) else [*axis]) not in ([-1], [len(input_shape) - 1]):
        raise InputError(
            f"axis is {axis} for an input of {len(input_shape)} axes; kmodels normalises the last "
            "one, -1: transpose the input, or use keras.layers.LayerNormalization"
        )
