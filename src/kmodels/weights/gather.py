"""The whole values of a variable of which each process of a run may hold a part."""

from typing import Any, Protocol

import keras

from kmodels.core.dispatch import Tensor, backend_module
from kmodels.core.errors import InputError
from kmodels.weights import deferred


class GatherBackend(Protocol):
    """Variables of which a process may hold a part, on one backend."""

    def in_parts(self, variable: keras.Variable) -> bool:
        """Returns whether this process lacks some of the values."""
        ...

    def whole(self, variable: keras.Variable) -> Tensor:
        """Returns all values; all processes call it together where each holds a part."""
        ...


_gather = backend_module("kmodels.weights.gather", GatherBackend, optional=True)


def whole(variable: Any) -> Any:
    """Returns all values of a tensor; of a sharded one, all processes call it together.

    Of one variable after another, so that no more than one is in memory whole.
    """
    return variable.value if _gather is None else _gather.whole(variable)


def check_whole(model: Any, what: str) -> None:
    """Raises `InputError` where no process holds all of a model's weights.

    Args:
        model: any.
        what: needs them, for the message.
    """
    deferred.check(model, what)
    if _gather is not None and any(map(_gather.in_parts, model.weights)):
        raise _refusal(what)


def check_callable(model: Any, what: str) -> None:
    """Raises `InputError` where layers have their weights only while a whole training step runs.

    Such are those of FSDP2; XLA gathers wherever a layer is called.

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
