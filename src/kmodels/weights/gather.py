"""The values of a variable on the host: gathered if processes hold parts of them, and assigned."""

from typing import Protocol

import keras
import numpy as np

from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.weights import deferred
from kmodels.weights.tensors import LazyArray


class HostBackend(Protocol):
    """Variables of one backend: their values gathered on the host, and host arrays assigned."""

    def in_parts(self, variable: keras.Variable) -> bool:
        """Returns True if this process lacks some of the values."""
        ...

    def whole(self, variable: keras.Variable) -> Tensor:
        """Returns all values; all processes call it together if each holds a part."""
        ...

    def fill(self, variable: keras.Variable, array: np.ndarray) -> None:
        """Assigns an array of the variable's shape, as its first value if it has none yet."""
        ...

    def fill_directly(self, variable: keras.Variable, source: LazyArray) -> bool:
        """Fills a variable without an array of all values on the way, where that pays.

        Returns False if it did nothing.
        """
        ...


host = backend_module("kmodels.weights.host", HostBackend)


def values(variable: keras.Variable) -> np.ndarray:
    """Returns a variable's values on the host, in its own dtype; all processes gather them.

    Only one sharded variable at a time is in memory whole.
    """
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return np.asarray(keras.ops.convert_to_numpy(host.whole(variable)), dtype=dtype)


def put(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns a host array of the variable's shape, as its first value if it has none yet."""
    host.fill(variable, array)


def check_whole(model: keras.Model, what: str) -> None:
    """Raises `InputError` for the operation `what` if no process holds all of a model's weights."""
    deferred.check(model, what)
    if any(map(host.in_parts, model.weights)):
        raise _refusal(what)


def check_callable(model: keras.Model, what: str) -> None:
    """Raises `InputError` if layers have their weights only while a whole training step runs.

    Models under FSDP2 are such; XLA gathers in any call of a layer. `what` is the operation.
    """
    deferred.check(model, what)
    if any(hasattr(variable, "gathered") for variable in model.weights):
        raise _refusal(what)


def _refusal(what: str) -> InputError:
    return InputError(
        f"{what} needs all weights on one device, and of this model each process holds a part; "
        "plan.export(model, directory) writes one for from_preset, without distribute"
    )
