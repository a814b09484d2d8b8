"""Affine map in float32 for TensorFlow on CPUs that truncate products in bfloat16."""

from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dense import check_width, dense
from kmodels.overrides._tensors_tensorflow import later, product, static_shape, truncates


def supports(call: OpCall) -> str | None:
    """Supports half precision that TensorFlow truncates."""
    if not truncates(tf.as_dtype(call.x.dtype)):
        return "TensorFlow rounds its own product"
    return None


@override(dense, supports)
def dense_tensorflow(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
    """Rounds the product once, and keeps nothing in float32 for the backward pass."""
    check_width(x, kernel)
    # Variables that are read inside would have to be declared.
    x, kernel = (tf.convert_to_tensor(ops.convert_to_tensor(each)) for each in (x, kernel))
    rows, shape = tf.reshape(x, (-1, static_shape(x)[-1])), tf.shape(x)

    @tf.custom_gradient
    def products(rows: tf.Tensor, kernel: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            rows_, kernel_ = later(gradient, rows, kernel)
            for_kernel = product(rows_, gradient, transpose_a=True)
            return product(gradient, kernel_, transpose_b=True), for_kernel

        return product(rows, kernel), backward

    y = products(rows, kernel)
    y = y if bias is None else tf.nn.bias_add(y, ops.convert_to_tensor(bias))
    return tf.reshape(y, tf.concat([shape[:-1], [static_shape(kernel)[1]]], 0))
