"""RMS normalisation for TensorFlow with a backward of its own: keeps x and a number per row."""

from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import override
from kmodels.ops.rms_norm import rms_norm
from kmodels.overrides._tensors_tensorflow import later, static_shape, wide


@override(rms_norm)
def rms_norm_tensorflow(
    x: tf.Tensor, scale: tf.Tensor | None, *, epsilon: float = 1e-6, offset: float = 1.0
) -> tf.Tensor:
    """Computes the op itself; the gradient tape would keep four wide arrays of x's size."""

    @tf.custom_gradient
    def norm(x: tf.Tensor, scale: tf.Tensor) -> Any:
        y = wide(x)
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(y), -1, keepdims=True) + epsilon)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            normal, slope = wide(later(gradient, x)) * inverse, wide(gradient)
            rows = tf.reshape(slope * normal, (-1, x.shape[-1]))
            slope = slope * (offset + wide(scale))
            inner = tf.reduce_mean(slope * normal, -1, keepdims=True)
            for_x = (slope - normal * inner) * inverse
            return tf.cast(for_x, x.dtype), tf.cast(tf.reduce_sum(rows, 0), scale.dtype)

        return tf.cast(y * inverse * (offset + wide(scale)), x.dtype), backward

    x = ops.convert_to_tensor(x)
    if scale is None:
        scale, offset = tf.ones(static_shape(x)[-1:], x.dtype), 0.0
    # Read here: a variable that is read inside would have to be declared.
    return norm(x, tf.convert_to_tensor(ops.convert_to_tensor(scale)))
