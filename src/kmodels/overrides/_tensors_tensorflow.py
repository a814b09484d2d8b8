"""Shared parts of the overrides with a backward pass of their own."""

from functools import cache
from typing import Any

import tensorflow as tf


@cache
def truncates(dtype: tf.DType) -> bool:
    """Returns whether products of a dtype have their last digits cut off, and not rounded.

    TensorFlow does so in bfloat16 on CPUs without AVX512, and its einsum rounds each sum there.
    """
    if dtype.size != 2 or not dtype.is_floating or tf.config.list_physical_devices("GPU"):
        return False
    last = 2.0**-7 if dtype == tf.bfloat16 else 2.0**-10
    with tf.init_scope():
        found = tf.matmul(tf.ones((1, 2), dtype), tf.constant([[1.0], [0.75 * last]], dtype))
        return float(found[0, 0]) == 1.0


def product(
    a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """`tf.matmul`, in float32 and rounded once where digits would be cut off."""
    if not truncates(a.dtype):
        return tf.matmul(a, b, transpose_a, transpose_b)
    return tf.cast(tf.matmul(wide(a), wide(b), transpose_a, transpose_b), a.dtype)


def wide(x: tf.Tensor) -> tf.Tensor:
    """Casts to float32 at least."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)


def static_shape(x: tf.Tensor) -> tuple[int, ...]:
    """Returns the sizes, of which those that are used are known; stubs allow None for each."""
    return x.shape  # type: ignore[return-value]


def later(gradient: tf.Tensor, *tensors: tf.Tensor) -> Any:
    """Tensors of the forward pass, for what the backward pass makes of them.

    TensorFlow computes what it can as soon as it can: without the gradient to wait for, that is
    in the forward pass, and it keeps all of it until then.
    """
    with tf.control_dependencies([gradient]):
        found = [tf.identity(x) for x in tensors]
    return found[0] if len(found) == 1 else found


def sum_of_rows(x: tf.Tensor) -> tf.Tensor:
    """(..., D) -> (D,): a fifth to two thirds of the time of `tf.reduce_sum`, in float32."""
    return tf.raw_ops.BiasAddGrad(out_backprop=wide(x))


def after(tensor: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
    """Returns a gradient that is handed on when those of the weights are there.

    With one thread for operations TensorFlow goes down the whole chain of a backward pass before it
    turns to what nothing waits for, and keeps all that the weights' gradients are made of.
    """
    with tf.control_dependencies(others):
        return tf.identity(tensor)
