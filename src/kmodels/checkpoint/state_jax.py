"""Arrays that lie on devices of several JAX processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.weights.files import Start
from kmodels.weights.tensors import Index, LazyArray

Held = dict[Start, np.ndarray]


def is_placed(variable: Any) -> bool:
    """See `StateBackend`."""
    return isinstance(variable.value, jax.Array) and not variable.value.is_fully_addressable


def parts(variable: Any) -> Iterator[tuple[Start, np.ndarray]]:
    """See `StateBackend`: of devices with equal parts, the first one's."""
    for shard in variable.value.addressable_shards:
        if shard.replica_id == 0:
            yield _start(shard.index), np.array(shard.data)


def read(variable: Any, array: LazyArray) -> Held:
    """See `StateBackend`: parts by their start, since devices may hold equal ones."""
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    parts: Held = {}
    indices: Any = variable.value.sharding.addressable_devices_indices_map(array.shape)
    for index in indices.values():
        if _start(index) not in parts:
            parts[_start(index)] = np.asarray(array.part(_whole(index, array.shape)), dtype)
    return parts


def put(variable: Any, values: Held) -> None:
    """See `StateBackend`."""
    sharding = variable.value.sharding
    shape = tuple(variable.shape)
    value = jax.make_array_from_callback(shape, sharding, lambda index: values[_start(index)])  # type: ignore[arg-type]
    keras_internals.give_value(variable, value)


def generators() -> dict[str, np.ndarray]:
    """See `StateBackend`: JAX keeps no generator."""
    return {}


def restore_generators(states: Mapping[str, np.ndarray]) -> None:
    """Does nothing, see `generators`."""


def _start(index: Index) -> Start:
    return tuple(piece.start or 0 for piece in index)


def _whole(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*piece.indices(size)[:2]) for piece, size in zip(index, shape, strict=True))
