"""Orbax's files: each process writes and reads the parts on its devices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from kmodels.checkpoint import state
from kmodels.checkpoint.format import as_counted
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, one_line

Variables = Mapping[str, Mapping[str, Any]]


def save(path: Path, variables: Variables) -> None:
    """See `orbax.save_orbax`."""
    tree = {
        part: {name: variable.value for name, variable in named.items()}
        for part, named in variables.items()
    }
    with _checkpointer() as checkpointer:
        checkpointer.save(path, tree)


def load(path: Path, variables: Variables) -> None:
    """See `orbax.load_orbax`."""
    with _checkpointer() as checkpointer:
        try:
            arrays = checkpointer.metadata(path).item_metadata.tree
        except (OSError, ValueError, AttributeError, KeyError) as error:
            raise InputError(
                f"{path} is not what save_orbax wrote: {one_line(error)[:200]}"
            ) from error
        arrays = {part: dict(arrays.get(part) or {}) for part in variables}
        # Names in the file by the names of the variables in this process.
        there = as_counted(
            {part: {n: n for n in of_part} for part, of_part in arrays.items()}, variables
        )
        named = {
            part: {name: arrays[part][stored] for name, stored in names.items()}
            for part, names in there.items()
        }
        state.check_fits(path, named, variables)
        target = {
            part: {there[part][name]: _like(variable) for name, variable in of_part.items()}
            for part, of_part in variables.items()
        }
        values = checkpointer.restore(path, target)
    for part, of_part in variables.items():
        for name, variable in of_part.items():
            keras_internals.give_value(variable, values[part][there[part][name]])


def _like(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=variable.value.sharding)


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise InputError("Orbax is not installed: pip install 'kmodels[orbax]'") from None
    return ocp.StandardCheckpointer()
