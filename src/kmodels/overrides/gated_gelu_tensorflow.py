"""Gated GELU for TensorFlow: float32 between its narrow ends, and nothing kept but its inputs."""

import math
from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import override
from kmodels.ops.gated_gelu import gated_gelu
from kmodels.overrides._tensors_tensorflow import later, wide

CUBE = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


@override(gated_gelu)
def gated_gelu_tensorflow(gate: tf.Tensor, up: tf.Tensor) -> tf.Tensor:
    """Rounds once, where the op rounds after each step of its polynomial."""

    @tf.custom_gradient
    def gated(gate: tf.Tensor, up: tf.Tensor) -> Any:
        x, y = wide(gate), wide(up)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x, y = map(wide, later(gradient, gate, up))
            slope = wide(gradient)
            share = _share(x)
            inner = SLOPE * (1.0 + (3.0 * CUBE) * x * x)
            for_gate = slope * y * share * (1.0 + x * (1.0 - share) * inner)
            return tf.cast(for_gate, gate.dtype), tf.cast(slope * x * share, up.dtype)

        return tf.cast(x * _share(x) * y, gate.dtype), backward

    return gated(ops.convert_to_tensor(gate), ops.convert_to_tensor(up))


def _share(x: tf.Tensor) -> tf.Tensor:
    """Returns what GELU lets pass of x, from 0 to 1."""
    return tf.sigmoid(SLOPE * x * (1.0 + CUBE * x * x))
