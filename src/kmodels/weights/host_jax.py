"""Host arrays into JAX variables."""

from functools import partial
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


def fill_large(variable: keras.Variable, source: LazyArray) -> bool:
    """Reads a first value into the memory where it stays; returns whether it could.

    An array of the host that JAX takes over, aligned to 64 bytes, would be no gain: a step that
    donates the variable copies it first.
    """
    if keras_internals.has_value(variable) or keras.distribution.distribution() is not None:
        return False
    table = jax.numpy.zeros(variable.shape, keras.backend.standardize_dtype(variable.dtype))
    for start, part in source.rows():
        # Without waiting, all parts are in memory until XLA comes to them.
        table = _with_rows(table, part, start).block_until_ready()
    keras_internals.give_value(variable, table)
    return True


@partial(jax.jit, donate_argnums=0)
def _with_rows(table: jax.Array, part: np.ndarray, start: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(table, part.astype(table.dtype), start, 0)


def fill_part(variable: keras.Variable, array: np.ndarray) -> NoReturn:
    """Is never called: XLA cuts variables, which take whole arrays."""
    raise NotImplementedError(variable.path)


def fill_mapped(variable: keras.Variable, source: LazyArray) -> Literal[False]:
    """Never does: JAX copies what is not aligned to 64 bytes, as tensors of files seldom are."""
    return False
