"""Variables of which each process of a run holds a part."""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np

from kmodels.core.dispatch import backend_module
from kmodels.weights.parts import Start
from kmodels.weights.tensors import LazyArray

# Parts of a variable in the form of one backend, as `read` gives them and `put` takes them.
Held: TypeAlias = Any


class ShardedBackend(Protocol):
    """Variables in parts on one backend."""

    def is_placed(self, variable: keras.Variable) -> bool:
        """Returns whether this process cannot see all values without the other processes."""
        ...

    def parts(self, variable: keras.Variable) -> Iterator[tuple[Start, np.ndarray]]:
        """Yields where each part begins that this process writes, and its values.

        They are in host memory of their own; parts that several processes hold are written by one.
        """
        ...

    def read(self, variable: keras.Variable, array: LazyArray) -> Held:
        """Returns what this process holds of a tensor of a file, in host memory."""
        ...

    def put(self, variable: keras.Variable, held: Held) -> None:
        """Assigns what `read` gave."""
        ...


_sharded = backend_module("kmodels.checkpoint.sharded", ShardedBackend, optional=True)


def is_placed(variable: Any) -> bool:
    """Returns whether this process cannot see all of its values without the other processes."""
    return _sharded is not None and _sharded.is_placed(variable)


def parts(variable: Any) -> Iterator[tuple[Start, np.ndarray]]:
    """Returns where the parts begin that this process writes, and their values."""
    return _backend().parts(variable)


def read(variable: Any, array: LazyArray) -> Held:
    """Returns what this process holds of a tensor of a file, in host memory."""
    return _backend().read(variable, array)


def put(variable: Any, held: Held) -> None:
    """Assigns what `read` gave."""
    _backend().put(variable, held)


def _backend() -> ShardedBackend:
    assert _sharded is not None  # else no variable is placed
    return _sharded
