"""The family whose layout table applies to a variable.

Families call the parts of a model by the same names, so a path alone does not say whose it is. A
layer takes the family of the model that is being made, and its variables take that of the layer,
those too that come later: adapters, quantized kernels, tables of another size.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

if TYPE_CHECKING:
    import keras

P = ParamSpec("P")

_making: ContextVar[str | None] = ContextVar("kmodels_layout_family", default=None)


@contextmanager
def making(family: str | None) -> Iterator[None]:
    """Layers and variables that are made inside the block belong to a family."""
    token = _making.set(family)
    try:
        yield
    finally:
        _making.reset(token)


def current() -> str | None:
    """Returns the family of the model that is being made; None outside of one."""
    return _making.get()


def family_of(variable: "keras.Variable") -> str | None:
    """Returns the family of a variable, also while it is made; None if unknown."""
    return getattr(variable, "layout_family", None) or _making.get()


def of_family(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Any, P], None]:
    """Decorates `__init__` of a backbone or task, whose variables belong to its family."""

    @functools.wraps(init)
    def inside(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        cls = type(self)
        owner = cls if hasattr(cls, "family") else getattr(cls, "backbone_class", cls)
        with making(getattr(owner, "family", None)):
            init(self, *args, **kwargs)

    # Keras reads the signature of `__init__` without unwrapping it.
    inside.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return inside
