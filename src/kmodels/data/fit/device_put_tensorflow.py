"""Batches for TensorFlow's devices."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

FORKS = False


def ahead() -> int:
    """Returns how many batches to prefetch: on a CPU they would take cores from the step."""
    return 2 if tf.config.list_physical_devices("GPU") else 0


def placer() -> Callable[[Any], Any]:
    """Returns what puts a batch where the step wants it."""

    def put(part: Any) -> Any:
        composite = isinstance(part, tf.RaggedTensor | tf.SparseTensor)
        return part if part is None or composite else tf.convert_to_tensor(part)

    return lambda batch: keras.tree.map_structure(put, batch)


def busy(output: object) -> Callable[[], bool] | None:
    """None: whether the device is still at the step cannot be asked without waiting for it."""
    return None
