"""TensorFlow as a runtime, whatever Keras runs on."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    import keras


def savedmodel(path: Path, samples: Sequence[np.ndarray], model: "keras.Model") -> list[np.ndarray]:
    """Returns what a SavedModel's endpoint "serve" gives, on the CPU."""
    with suppress(RuntimeError):  # it is at work already
        # It would take the memory of all accelerators.
        tf.config.set_visible_devices([], "GPU")
    with tf.device("CPU:0"):
        loaded = tf.saved_model.load(str(path))
        return [np.asarray(loaded.serve(tf.constant(sample))) for sample in samples]
