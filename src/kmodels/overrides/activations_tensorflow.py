"""GELU and its gate for TensorFlow: computed in float32, rounded once, only the inputs are kept."""

import math
from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.activations import gated_gelu, gelu
from kmodels.overrides._tensors_tensorflow import later, wide

CUBE = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def _exact_only(call: OpCall) -> str | None:
    return "only the exact form was measured to be faster" if call.approximate else None


@override(gelu, _exact_only)
def gelu_tensorflow(x: tf.Tensor, *, approximate: bool | str = False) -> tf.Tensor:
    """TensorFlow's error function in bfloat16 takes ten times that of float32 on a CPU."""

    @tf.custom_gradient
    def exact(x: tf.Tensor) -> Any:
        y = wide(x)

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            y = wide(later(gradient, x))
            return tf.cast((normal(y) + y * density(y)) * wide(gradient), x.dtype)

        return tf.cast(y * normal(y), x.dtype), backward

    return exact(ops.convert_to_tensor(x))


def normal(x: tf.Tensor) -> tf.Tensor:
    """Returns the distribution function of the standard normal distribution."""
    return 0.5 + 0.5 * tf.math.erf(x * math.sqrt(0.5))


def density(x: tf.Tensor) -> tf.Tensor:
    """Returns the density of the standard normal distribution."""
    return tf.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


@override(gated_gelu)
def gated_gelu_tensorflow(gate: tf.Tensor, up: tf.Tensor) -> tf.Tensor:
    """Rounds once; the op's own body rounds after each step of its polynomial."""

    @tf.custom_gradient
    def gated(gate: tf.Tensor, up: tf.Tensor) -> Any:
        x, y = wide(gate), wide(up)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x, y = map(wide, later(gradient, gate, up))
            slope = wide(gradient)
            share = _sigmoid(x)
            inner = SLOPE * (1.0 + (3.0 * CUBE) * x * x)
            for_gate = slope * y * share * (1.0 + x * (1.0 - share) * inner)
            return tf.cast(for_gate, gate.dtype), tf.cast(slope * x * share, up.dtype)

        return tf.cast(x * _sigmoid(x) * y, gate.dtype), backward

    return gated(ops.convert_to_tensor(gate), ops.convert_to_tensor(up))


def _sigmoid(x: tf.Tensor) -> tf.Tensor:
    """Returns 0.5 (1 + tanh(u)) of GELU's tanh form."""
    return tf.sigmoid(SLOPE * x * (1.0 + CUBE * x * x))
