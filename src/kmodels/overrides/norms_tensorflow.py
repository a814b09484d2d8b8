"""Normalization for TensorFlow: the backward pass keeps x and one or two numbers per row.

The gradient tape would keep several arrays of x's size in float32.
"""

from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import override
from kmodels.ops.norms import layer_norm, rms_norm
from kmodels.overrides._tensors_tensorflow import after, later, static_shape, sum_of_rows, wide


@override(layer_norm)
def layer_norm_tensorflow(
    x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor | None = None, *, epsilon: float = 1e-6
) -> tf.Tensor:
    """Keeps x and two numbers per row for the backward pass."""

    @tf.custom_gradient
    def norm(x: tf.Tensor, scale: tf.Tensor, *bias: tf.Tensor) -> Any:
        full = wide(x)
        mean = tf.reduce_mean(full, -1, keepdims=True)
        inverse = tf.reduce_mean(tf.math.squared_difference(full, mean), -1, keepdims=True)
        inverse = tf.math.rsqrt(inverse + epsilon)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
            slope, factor = wide(gradient), wide(scale) / static_shape(x)[-1]
            normal = (wide(later(gradient, x)) - mean) * inverse
            product = slope * normal
            for_scale = sum_of_rows(product)
            for_bias = [tf.cast(sum_of_rows(slope), b.dtype) for b in bias]
            # Means over the last axis, as products: they leave nothing of x's size behind.
            slope = after(slope, for_scale, *for_bias)
            of_slope = tf.linalg.matvec(slope, factor)[..., None]
            of_product = tf.linalg.matvec(product, factor)[..., None]
            for_x = (slope * wide(scale) - of_slope - normal * of_product) * inverse
            return tf.cast(for_x, x.dtype), tf.cast(for_scale, scale.dtype), *for_bias

        output = (full - mean) * inverse * wide(scale)
        for shift in bias:
            output += wide(shift)
        return tf.cast(output, x.dtype), backward

    # Read here: a variable that is read inside would have to be declared.
    parameters = [scale] if bias is None else [scale, bias]
    parameters = [tf.convert_to_tensor(ops.convert_to_tensor(value)) for value in parameters]
    x = ops.convert_to_tensor(x)
    if x.shape.rank is None or x.shape.rank <= 3:
        return norm(x, *parameters)
    # With TensorFlow 2.21 the gradient of more dimensions was seen to end in memory errors of
    # oneDNN's kernels with several threads on a CPU.
    y = tf.reshape(norm(tf.reshape(x, (-1, x.shape[-1])), *parameters), tf.shape(x))
    y.set_shape(x.shape)
    return y


@override(rms_norm)
def rms_norm_tensorflow(
    x: tf.Tensor, scale: tf.Tensor | None, *, epsilon: float = 1e-6, offset: float = 1.0
) -> tf.Tensor:
    """Keeps x and one number per row for the backward pass."""

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
