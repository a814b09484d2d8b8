"""Host arrays into JAX variables."""

from typing import Literal, NoReturn

import jax
import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.weights.tensors import LazyArray


def fill(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns an array; as a first value it is copied once, or lies in the memory of the array.

    Keras lets `jnp.asarray` make the tensor, which is in memory three times for a moment: for the
    table of a large vocabulary that is the peak of the whole load.
    """
    array = np.asarray(array, np.dtype(keras.backend.standardize_dtype(variable.dtype)))
    if keras_internals.has_value(variable):
        variable.assign(array)
    elif keras.distribution.distribution() is None:
        keras_internals.give_value(variable, jax.device_put(array))
    else:  # which cuts it
        tensor = keras.ops.convert_to_tensor(array, array.dtype.name)
        keras_internals.give_value(variable, tensor)


def fill_part(variable: keras.Variable, array: np.ndarray) -> NoReturn:
    """Is never called: XLA cuts variables, which take whole arrays."""
    raise NotImplementedError(variable.path)


def fill_mapped(variable: keras.Variable, source: LazyArray) -> Literal[False]:
    """Never does: JAX copies what is not aligned to 64 bytes, as tensors of files seldom are."""
    return False
