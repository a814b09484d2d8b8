"""Host arrays into TensorFlow variables."""

from typing import Literal, NoReturn

import keras
import numpy as np
import tensorflow as tf

from kmodels.core import keras_internals
from kmodels.weights.tensors import LazyArray


def fill(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns a tensor that nothing else holds, so that the variable takes it over as it is.

    It does not assign row by row: after that, TensorFlow copies the variable whenever it is read.
    """
    tensor = tf.cast(tf.constant(array), keras.backend.standardize_dtype(variable.dtype))
    if keras_internals.has_value(variable):
        variable.value.assign(tensor)
    else:
        keras_internals.give_value(variable, tensor)


def fill_part(variable: keras.Variable, array: np.ndarray) -> NoReturn:
    """Is never called: no variable of TensorFlow lies in parts."""
    raise NotImplementedError(variable.path)


def fill_large(variable: keras.Variable, source: LazyArray) -> Literal[False]:
    """Never does: a variable of TensorFlow takes over memory of TensorFlow's alone."""
    return False


def fill_mapped(variable: keras.Variable, source: LazyArray) -> Literal[False]:
    """Never does: a variable of TensorFlow has memory of its own."""
    return False
