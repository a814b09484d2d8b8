"""Rotary position embedding for TensorFlow; the gradient is the inverse rotation."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import override
from kmodels.ops.rotary_embedding import (
    check_rotary_embedding,
    rotary_embedding,
    rotary_frequencies,
)
from kmodels.overrides._tensors_tensorflow import static_shape


@override(rotary_embedding)
def rotary_embedding_tensorflow(
    x: tf.Tensor,
    positions: tf.Tensor | None = None,
    *,
    max_wavelength: float = 10_000.0,
    scaling: float | Sequence[float] = 1.0,
    turned: float = 1.0,
) -> tf.Tensor:
    """The gradient tape would pad and add halves of gradients."""
    check_rotary_embedding(x)
    x = ops.convert_to_tensor(x)
    numbers = tf.range(tf.shape(x)[1]) if positions is None else positions
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    frequencies = rotary_frequencies(static_shape(x)[-1], max_wavelength, scaling, turned)
    # The stub knows neither `...` nor None in an index.
    places: Any = tf.cast(ops.convert_to_tensor(numbers), dtype)
    angles = places[..., None] * tf.constant(frequencies, dtype)
    angles = angles[..., None, :]  # (T, 1, H/2) or (B, T, 1, H/2)
    cosine, sine = tf.cos(angles), tf.sin(angles)

    @tf.custom_gradient
    def rotation(x: tf.Tensor) -> Any:
        return _rotate(x, cosine, sine), lambda gradient: _rotate(gradient, cosine, -sine)

    return rotation(x)


def _rotate(x: tf.Tensor, cosine: tf.Tensor, sine: tf.Tensor) -> tf.Tensor:
    first, second = tf.split(tf.cast(x, cosine.dtype), 2, axis=-1)
    parts = (first * cosine - second * sine, second * cosine + first * sine)
    return tf.concat([tf.cast(part, x.dtype) for part in parts], axis=-1)
