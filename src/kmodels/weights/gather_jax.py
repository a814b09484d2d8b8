"""Arrays on devices of several JAX processes, gathered."""

from typing import TYPE_CHECKING, Any

import jax
from jax.experimental import multihost_utils

if TYPE_CHECKING:
    import keras


def in_parts(variable: "keras.Variable") -> bool:
    """See `gather`."""
    value = variable.value
    held = not isinstance(value, jax.Array) or value.is_fully_addressable
    return not held and not value.is_fully_replicated


def whole(variable: "keras.Variable") -> Any:
    """See `gather`; what every device holds whole is taken from one, without the others."""
    value = variable.value
    if in_parts(variable):
        return multihost_utils.process_allgather(value, tiled=True)
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    return value.addressable_data(0)
