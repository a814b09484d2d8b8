"""Shared parts of the overrides with a backward pass of their own."""

from typing import Any

import tensorflow as tf


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
