"""The exact GELU for TensorFlow: float32 between its narrow ends, nothing kept but its input."""

import math
from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.gelu import gelu
from kmodels.overrides._tensors_tensorflow import later, wide


def supports(call: OpCall) -> str | None:
    """Returns the form with the error function."""
    return "only the exact form was measured to be faster" if call.approximate else None


@override(gelu, supports)
def gelu_tensorflow(x: tf.Tensor, *, approximate: bool | str = False) -> tf.Tensor:
    """TensorFlow's error function in bfloat16 takes ten times that of float32 on a CPU."""

    @tf.custom_gradient
    def exact(x: tf.Tensor) -> Any:
        y = wide(x)

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            y = wide(later(gradient, x))
            return tf.cast((share(y) + y * density(y)) * wide(gradient), x.dtype)

        return tf.cast(y * share(y), x.dtype), backward

    return exact(ops.convert_to_tensor(x))


def share(x: tf.Tensor) -> tf.Tensor:
    """Returns the normal distribution function."""
    return 0.5 + 0.5 * tf.math.erf(x * math.sqrt(0.5))


def density(x: tf.Tensor) -> tf.Tensor:
    """Returns its derivative."""
    return tf.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
