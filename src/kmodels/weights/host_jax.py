"""Variables of JAX on the host: values gathered, and host arrays assigned."""

from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

from kmodels.core import keras_internals
from kmodels.weights.tensors import LazyArray


def in_parts(variable: keras.Variable) -> bool:
    """Returns True if this process lacks some of the values."""
    value = variable.value
    is_here = not isinstance(value, jax.Array) or value.is_fully_addressable
    return not is_here and not value.is_fully_replicated


def whole(variable: keras.Variable) -> Any:
    """Returns all values; a replicated variable is taken from one device, without the others."""
    value = variable.value
    if in_parts(variable):
        return multihost_utils.process_allgather(value, tiled=True)
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    return value.addressable_data(0)


def fill(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns an array; a first value is copied at most once.

    Keras would call `jnp.asarray`, which holds three copies for a moment: with the table of a large
    vocabulary that is the peak of the whole load.
    """
    array = np.asarray(array, np.dtype(keras.backend.standardize_dtype(variable.dtype)))
    if keras_internals.has_value(variable):
        variable.assign(array)
    elif keras.distribution.distribution() is None:
        keras_internals.give_value(variable, jax.device_put(array))
    else:  # which shards it
        tensor = keras.ops.convert_to_tensor(array, array.dtype.name)
        keras_internals.give_value(variable, tensor)


def fill_directly(variable: keras.Variable, source: LazyArray) -> bool:
    """Reads a large first value into its final memory.

    To let JAX take over an aligned array of the host would be no gain: a step that donates the
    variable copies it first. Most arrays in files are not aligned to 64 bytes, so it copies them.
    """
    if not source.is_large or keras_internals.has_value(variable):
        return False
    if keras.distribution.distribution() is not None:
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
