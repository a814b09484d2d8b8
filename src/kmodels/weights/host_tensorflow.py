"""Variables of TensorFlow on the host: values gathered, and host arrays assigned."""

from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kmodels.core import keras_internals
from kmodels.weights.tensors import LazyArray


def in_parts(variable: keras.Variable) -> bool:
    """Returns False: no strategy that kmodels supports shards a variable."""
    return False


def whole(variable: keras.Variable) -> Any:
    """Returns one of the replicas' equal copies, or the sum of their own counts."""
    value = variable.value
    return value.read_value() if isinstance(value, tf.distribute.DistributedValues) else value


def fill(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns a tensor that nothing else holds, so that the variable takes over its memory.

    Never row by row: after that, TensorFlow copies the variable whenever it is read.
    """
    tensor = tf.cast(tf.constant(array), keras.backend.standardize_dtype(variable.dtype))
    if keras_internals.has_value(variable):
        variable.value.assign(tensor)
    else:
        keras_internals.give_value(variable, tensor)


def fill_directly(variable: keras.Variable, source: LazyArray) -> Literal[False]:
    """Returns False: a variable of TensorFlow takes over memory of TensorFlow alone."""
    return False
