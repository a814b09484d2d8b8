"""Shared parts of overrides with a custom gradient."""

from functools import cache
from typing import Any

import tensorflow as tf


@cache
def truncates(dtype: tf.DType) -> bool:
    """Returns True if products in a dtype are truncated instead of rounded.

    TensorFlow does so in bfloat16 on CPUs without AVX512, and its einsum rounds each sum there.
    """
    if dtype.size != 2 or not dtype.is_floating or tf.config.list_physical_devices("GPU"):
        return False
    last = 2.0**-7 if dtype == tf.bfloat16 else 2.0**-10
    with tf.init_scope():
        products = tf.matmul(tf.ones((1, 2), dtype), tf.constant([[1.0], [0.75 * last]], dtype))
        return float(products[0, 0]) == 1.0


def product(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """`tf.matmul`; in float32 and rounded once if its dtype would be truncated."""
    if not truncates(a.dtype):
        return tf.matmul(a, b, transpose_a, transpose_b)
    return tf.cast(tf.matmul(wide(a), wide(b), transpose_a, transpose_b), a.dtype)


def wide(x: tf.Tensor) -> tf.Tensor:
    """Casts to float32 at least."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)


def static_shape(x: tf.Tensor) -> tuple[int, ...]:
    """Returns the sizes for the type checker, whose stubs allow None for each."""
    return x.shape  # type: ignore[return-value]


def later(gradient: tf.Tensor, *tensors: tf.Tensor) -> Any:
    """Returns tensors of the forward pass that wait for the gradient.

    TensorFlow runs an operation as soon as its inputs exist. Without this dependency it would run
    parts of the backward pass during the forward pass, and keep their results until then.
    """
    with tf.control_dependencies([gradient]):
        copies = [tf.identity(x) for x in tensors]
    return copies[0] if len(copies) == 1 else copies


def sum_of_rows(x: tf.Tensor) -> tf.Tensor:
    """(..., D) -> (D,): a fifth to two thirds of the time of `tf.reduce_sum`, in float32."""
    return tf.raw_ops.BiasAddGrad(out_backprop=wide(x))


def after(tensor: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
    """Returns a gradient that waits for those of the weights.

    With one thread for operations, TensorFlow otherwise runs the whole chain of a backward pass
    first, and keeps the inputs of all weight gradients meanwhile.
    """
    with tf.control_dependencies(others):
        return tf.identity(tensor)
