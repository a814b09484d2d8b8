"""The values of a variable on the host: gathered where processes hold parts of them, and put."""

from typing import Any, Protocol

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.weights import deferred
from kmodels.weights.tensors import LazyArray


class GatherBackend(Protocol):
    """Variables of which a process may hold a part, on one backend."""

    def in_parts(self, variable: keras.Variable) -> bool:
        """Returns whether this process lacks some of the values."""
        ...

    def whole(self, variable: keras.Variable) -> Tensor:
        """Returns all values; all processes call it together where each holds a part."""
        ...


class HostBackend(Protocol):
    """Host arrays into variables, where a backend has a way without copies."""

    def fill(self, variable: keras.Variable, array: np.ndarray) -> None:
        """Assigns an array of the variable's shape, as its first value where it has none yet."""
        ...

    def fill_part(self, variable: keras.Variable, array: np.ndarray) -> None:
        """Assigns the part that this process holds of a variable that says its `index`."""
        ...

    def fill_large(self, variable: keras.Variable, source: LazyArray) -> bool:
        """Reads a first value into the memory where it stays; returns whether it could."""
        ...

    def fill_mapped(self, variable: keras.Variable, source: LazyArray) -> bool:
        """Leaves the values in the pages of their file, where it can; returns whether it did."""
        ...


_gather = backend_module("kmodels.weights.gather", GatherBackend, optional=True)
host = backend_module("kmodels.weights.host", HostBackend, optional=True)


def whole(variable: keras.Variable) -> Any:
    """Returns all values of a tensor; of a sharded one, all processes call it together.

    Takes one variable after another, so that no more than one is in memory whole.
    """
    return variable.value if _gather is None else _gather.whole(variable)


def values(variable: keras.Variable) -> np.ndarray:
    """Returns a variable's values on the host, in its own dtype; all processes gather them."""
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return np.asarray(keras.ops.convert_to_numpy(whole(variable)), dtype=dtype)


def put(variable: keras.Variable, array: np.ndarray) -> None:
    """Assigns a host array of the variable's shape, as its first value where it has none yet."""
    if host is not None:
        host.fill(variable, array)
        return
    dtype = keras.backend.standardize_dtype(variable.dtype)
    array = np.asarray(array, dtype=np.dtype(dtype))
    if keras_internals.has_value(variable):
        variable.assign(array)
    else:
        keras_internals.give_value(variable, keras.ops.convert_to_tensor(array, dtype))


def check_whole(model: keras.Model, what: str) -> None:
    """Raises `InputError` where no process holds all of a model's weights.

    Args:
        model: any.
        what: needs them, for the message.
    """
    deferred.check(model, what)
    if _gather is not None and any(map(_gather.in_parts, model.weights)):
        raise _refusal(what)


def check_callable(model: keras.Model, what: str) -> None:
    """Raises `InputError` where layers have their weights only while a whole training step runs.

    Those of FSDP2 are such models; XLA gathers wherever a layer is called.

    Args:
        model: any.
        what: calls its layers, for the message.
    """
    deferred.check(model, what)
    if any(hasattr(variable, "gathered") for variable in model.weights):
        raise _refusal(what)


def _refusal(what: str) -> InputError:
    return InputError(
        f"{what} needs all weights on one device, and of this model each process holds a part; "
        "plan.export(model, directory) writes one for from_preset, without distribute"
    )
