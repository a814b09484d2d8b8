"""Variables of which each process of a run holds a part."""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np

from kmodels.core import processes
from kmodels.core.dispatch import backend_module
from kmodels.weights.parts import Start
from kmodels.weights.tensors import LazyArray

# Parts of a variable in the form of one backend: `read` returns them and `put` assigns them.
Held: TypeAlias = Any


class ShardedBackend(Protocol):
    """Variables in parts on one backend."""

    def is_placed(self, variable: keras.Variable) -> bool:
        """Returns True if a process holds only a part of the values."""
        ...

    def parts(self, variable: keras.Variable) -> Iterator[tuple[Start, np.ndarray]]:
        """Yields the start index and a host copy of each part that this process writes.

        A part that several processes hold is written by one of them.
        """
        ...

    def read(self, variable: keras.Variable, array: LazyArray) -> Held:
        """Reads the parts of a tensor in a file that this process holds into host memory."""
        ...

    def put(self, variable: keras.Variable, held: Held) -> None:
        """Assigns the result of `read`."""
        ...


_backend = backend_module("kmodels.checkpoint.sharded", ShardedBackend, optional=True)


def in_parts(variable: keras.Variable) -> bool:
    """Returns True if the values of a variable are spread over several processes."""
    return processes.count() > 1 and _backend is not None and _backend.is_placed(variable)


def backend() -> ShardedBackend:
    """Returns the parts of variables on the running backend, for variables that are `in_parts`."""
    assert _backend is not None  # else no variable is in parts
    return _backend
