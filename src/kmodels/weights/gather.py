"""The whole values of a variable of which each process of a run may hold a part."""

from typing import Any

from kmodels.dispatch import backend_module

_gather: Any = backend_module("kmodels.weights.gather")


def whole(variable: Any) -> Any:
    """A tensor or array of all values; all processes call it together where each holds a part.

    Of one variable after another, so that no more than one is in memory whole.
    """
    return variable.value if _gather is None else _gather.whole(variable)
