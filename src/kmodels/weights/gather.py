"""The whole values of a variable of which each process of a run may hold a part.

`gather_<backend>.py` has two things: `whole(variable)`, and `in_parts(variable)`, whether this
process lacks some of its values.
"""

from typing import Any

from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.weights import deferred

_gather: Any = backend_module("kmodels.weights.gather")


def whole(variable: Any) -> Any:
    """A tensor or array of all values; all processes call it together where each holds a part.

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
