"""Gated GELU for TensorFlow: float32 between its narrow ends, and nothing kept but its inputs."""

import math

import tensorflow as tf
from keras import ops

from kmodels.dispatch import Tensor, override
from kmodels.ops.gated_gelu import gated_gelu

CUBE = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def supports(gate: Tensor, up: Tensor) -> str | None:
    """Half precision, in which it was measured to be faster."""
    narrow = tf.as_dtype(gate.dtype).size < 4
    return None if narrow else "in float32 the op itself is as fast"


@override(gated_gelu, supports)
def gated_gelu_tensorflow(gate: Tensor, up: Tensor) -> Tensor:
    """Rounds once, where the op rounds after each step of its polynomial."""

    @tf.custom_gradient
    def gated(gate: Tensor, up: Tensor) -> tuple:
        x, y = _wide(gate), _wide(up)

        def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, slope = _wide(gate), _wide(gradient)
            share = _share(x)
            inner = SLOPE * (1.0 + (3.0 * CUBE) * x * x)
            for_gate = slope * _wide(up) * share * (1.0 + x * (1.0 - share) * inner)
            return tf.cast(for_gate, gate.dtype), tf.cast(slope * x * share, up.dtype)

        return tf.cast(x * _share(x) * y, gate.dtype), backward

    return gated(ops.convert_to_tensor(gate), ops.convert_to_tensor(up))


def _share(x: Tensor) -> Tensor:
    """What GELU lets pass of x, from 0 to 1."""
    return tf.sigmoid(SLOPE * x * (1.0 + CUBE * x * x))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
