"""Gradient checkpointing on TensorFlow."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmodels.core import keras_internals
from kmodels.layers.remat import tensors_apart


def call(
    layer: keras.Layer,
    fn: Callable[..., Any],
    seeds: list[Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """See `RematBackend.call`."""
    # Variables may be replaced by tensors, whose gradients TensorFlow would lose.
    with keras_internals.no_autocast():
        stateless = any(not isinstance(v.value, tf.Variable) for v in layer.trainable_variables)
    if stateless:
        return fn(*args, **kwargs)
    tensors, fill = tensors_apart(args, kwargs)
    begun = [tf.identity(seed.value) for seed in seeds]
    first = True

    def run(*tensors: tf.Tensor) -> Any:
        nonlocal first
        again, named = fill(*tensors)
        if first:
            first = False
            return fn(*again, **named)
        now = [tf.identity(seed.value) for seed in seeds]
        _assign(seeds, begun)
        output = fn(*again, **named)
        _assign(seeds, now)
        return output

    return tf.recompute_grad(run)(*tensors)


def _assign(seeds: list[Any], values: list[Any]) -> None:
    for seed, value in zip(seeds, values, strict=True):
        seed.assign(value)
