"""The part of TensorFlow in `kmodels parity --op`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def gradients(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[tf.Tensor]
) -> tuple[Any, Sequence[Any]]:
    """See `OpParityBackend.gradients`."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value, rest = function(*tensors)
    return rest, tape.gradient(value, tensors)
