"""Methods of our own with the parameters of Keras'."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def like(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a method the parameters of the one that it overrides, by place and by name.

    So `fit(x, y, 32, 5)` means what it does in Keras, and what a later Keras adds is taken too.

    Args:
        original: the method of `keras.Model`.

    Returns:
        A decorator. The method under it gets by name what was given, and no defaults.
    """
    parameters = inspect.signature(original)
    rest = [p.name for p in parameters.parameters.values() if p.kind is p.VAR_KEYWORD]

    def decorate(method: Callable[..., R]) -> Callable[P, R]:
        @wraps(method)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            given = dict(parameters.bind(*args, **kwargs).arguments)
            more: dict[str, Any] = given.pop(rest[0], {}) if rest else {}
            return method(given.pop("self"), **given, **more)

        vars(bound)["__signature__"] = parameters
        return bound

    return decorate
