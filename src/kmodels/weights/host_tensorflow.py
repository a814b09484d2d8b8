"""Host arrays into TensorFlow variables."""

from typing import Any

import numpy as np
import tensorflow as tf


def fill(variable: Any, array: np.ndarray) -> None:
    """Assigns a tensor that nothing else holds, so that the variable takes it over as it is.

    Not row by row: after that, TensorFlow copies the variable whenever it is read.
    """
    variable.value.assign(tf.cast(tf.constant(array), variable.value.dtype))
