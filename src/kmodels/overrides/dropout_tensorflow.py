"""Dropout for TensorFlow: 16 random bits an element, and a byte each to keep."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.dropout import check_rate, dropout
from kmodels.overrides._tensors_tensorflow import later, wide

LANE = 1 << 16


def unsupported(
    x: tf.Tensor, rate: float, seed: keras.random.SeedGenerator | tf.Tensor
) -> str | None:
    """Returns why this dropout is not supported (a clause), or None."""
    if not isinstance(seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if not 0 < round(rate * LANE) < LANE:
        return "the rate rounds to 0 or 1 in 16 bits"
    return None


def supports(call: OpCall) -> str | None:
    """Supports seeded dropout with a rate that 16 bits distinguish from 0 and 1."""
    return unsupported(call.x, call.rate, call.seed)


@override(dropout, supports)
def dropout_tensorflow(
    x: tf.Tensor, rate: float, seed: keras.random.SeedGenerator | tf.Tensor
) -> tf.Tensor:
    """Drops `round(rate * 65536)` of 65,536 draws; scales by exactly the share that stays."""
    check_rate(rate)
    x = ops.convert_to_tensor(x)
    kept, scale = keep(seed, tf.shape(x), rate)

    @tf.custom_gradient
    def drop(x: tf.Tensor) -> Any:
        def scaled(y: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
            # It multiplies in float32, for 1 / (1 - rate) would be rounded to bfloat16.
            full = wide(y)
            return tf.cast(full * (tf.cast(kept, full.dtype) * scale), y.dtype)

        return scaled(x, kept), lambda gradient: scaled(gradient, later(gradient, kept))

    return drop(x)


def keep(
    seed: keras.random.SeedGenerator, shape: tf.Tensor | tuple[Any, ...], rate: float
) -> tuple[tf.Tensor, float]:
    """Returns the dropout mask, uint8 of 0 and 1, and the factor of the elements that stay."""
    dropped = round(rate * LANE)
    state, count = tf.cast(seed.next(), tf.int64), tf.reduce_prod(shape)
    # Four draws each. The arguments go by name: the stub allows no tensors in shapes, and no None.
    whole: Any = {"shape": ((count + 3) // 4,), "minval": None, "maxval": None}
    words = tf.random.stateless_uniform(seed=state, dtype=tf.uint64, **whole)
    lanes = tf.reshape(tf.bitcast(words, tf.int16), (-1,))[:count]
    kept = tf.cast(tf.reshape(lanes, shape) >= dropped - LANE // 2, tf.uint8)
    return kept, LANE / (LANE - dropped)
