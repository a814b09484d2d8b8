"""The MLP for TensorFlow with a custom gradient, which keeps one array of hidden activations.

The backward pass recomputes the outputs of GELU and dropout, and casts kernels again whose dtype is
narrower than that of their variables.
"""

import keras
import tensorflow as tf
from keras import ops

from kmodels.core import keras_internals
from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dense import check_width
from kmodels.ops.mlp import mlp
from kmodels.overrides import dropout_tensorflow
from kmodels.overrides._tensors_tensorflow import (
    after,
    later,
    product,
    static_shape,
    sum_of_rows,
    wide,
)
from kmodels.overrides.activations_tensorflow import density, normal


def supports(call: OpCall) -> str | None:
    """Supports GELU by the error function, and the dropout that its override supports."""
    if call.approximate:
        return "only the exact form of GELU was measured to be faster"
    if call.dropout and call.seed is not None:
        return dropout_tensorflow.unsupported(call.x, call.dropout, call.seed)
    return None


@override(mlp, supports)
def mlp_tensorflow(
    x: tf.Tensor,
    up: tf.Tensor,
    up_bias: tf.Tensor | None,
    down: tf.Tensor,
    down_bias: tf.Tensor | None,
    *,
    approximate: bool | str = False,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes the same products; GELU is in float32, as in its own override."""
    check_width(x, up)
    check_width(up, down)
    x = ops.convert_to_tensor(x)
    hidden_dim, shape = up.shape[1], tf.shape(x)
    rows = tf.reshape(x, (-1, x.shape[-1]))
    kept, factor = None, 1.0
    if dropout and seed is not None:
        kept, factor = dropout_tensorflow.keep(seed, (tf.shape(rows)[0], hidden_dim), dropout)

    def dropped(full: tf.Tensor, kept: tf.Tensor | None) -> tf.Tensor:
        return full if kept is None else full * (tf.cast(kept, full.dtype) * factor)

    @tf.custom_gradient
    def products(rows: tf.Tensor, up: tf.Tensor, down: tf.Tensor, *biases: tf.Tensor) -> tuple:
        # Those that were given, in this order.
        left = iter(biases)
        of_up = None if up_bias is None else next(left)
        of_down = None if down_bias is None else next(left)
        hidden = _affine(rows, tf.cast(up, rows.dtype), of_up)
        full = wide(hidden)
        active = tf.cast(dropped(full * normal(full), kept), rows.dtype)

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
            again = [up, down, rows, hidden] + ([] if kept is None else [kept])
            up_, down_, rows_, hidden_, *drawn = later(gradient, *again)
            up_, down_ = tf.cast(up_, rows.dtype), tf.cast(down_, rows.dtype)
            full, stays = wide(hidden_), None if kept is None else drawn[0]
            below = normal(full)
            active = tf.cast(dropped(full * below, stays), rows.dtype)
            for_down = product(active, gradient, transpose_a=True)
            slope = dropped(wide(product(gradient, down_, transpose_b=True)), stays)
            slope *= below + full * density(full)
            narrow = tf.cast(slope, rows.dtype)
            for_up = product(rows_, narrow, transpose_a=True)
            sums = (slope if of_up is not None else None, gradient if of_down is not None else None)
            for_biases = [tf.cast(sum_of_rows(x), rows.dtype) for x in sums if x is not None]
            for_up, for_down = tf.cast(for_up, up.dtype), tf.cast(for_down, down.dtype)
            narrow = after(narrow, for_up, for_down, *for_biases)
            return product(narrow, up_, transpose_b=True), for_up, for_down, *for_biases

        return _affine(active, tf.cast(down, rows.dtype), of_down), backward

    # Read here: variables that are read inside would have to be declared.
    biases = [ops.convert_to_tensor(bias) for bias in (up_bias, down_bias) if bias is not None]
    with keras_internals.no_autocast():
        kernels = [ops.convert_to_tensor(kernel) for kernel in (up, down)]
    weights = [tf.convert_to_tensor(value) for value in (*kernels, *biases)]
    output = products(rows, *weights)
    return tf.reshape(output, tf.concat([shape[:-1], [static_shape(down)[1]]], 0))


def _affine(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    y = product(x, kernel)
    return y if bias is None else tf.nn.bias_add(y, bias)
