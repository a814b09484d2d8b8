"""How far a variable may be cut and when it is used, told to whoever places it on devices.

The outputs of a kernel that make one attention head belong together: cut apart, each product of
queries and keys would be a sum over devices. The shape alone does not show that (a kernel of one
key/value head has 256 columns), so the layer that makes a variable says it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from kmodels.core import keras_internals

# By dimension: how many equal parts may lie apart; None for as many as the dimension is long.
Parts = Sequence[int | None]

_making: ContextVar[Parts | None] = ContextVar("kmodels_parts", default=None)


def add_weight(layer: Any, parts: Parts | None, **settings: Any) -> Any:
    """`layer.add_weight(**settings)` of a variable that has these parts.

    It gets its place while it is made, before it can carry anything itself.
    """
    token = _making.set(parts)
    try:
        if keras_internals.draws_later():
            with keras_internals.without_values():
                variable = layer.add_weight(**settings)
            keras_internals.draw_values([variable])
        else:
            variable = layer.add_weight(**settings)
    finally:
        _making.reset(token)
    if parts is not None:
        variable.parts = tuple(parts)
    return variable


def parts_of(variable: Any) -> Parts | None:
    """The parts of a variable that exists, or is being made; None where nobody said."""
    return getattr(variable, "parts", None) or _making.get()


class _Use(threading.local):
    """Whether a layer's variables are read outside its call; torch.compile reads no ContextVar."""

    active = False


_use = _Use()


@contextmanager
def using() -> Iterator[None]:
    """What is read inside the block counts as read inside a layer."""
    before, _use.active = _use.active, True
    try:
        yield
    finally:
        _use.active = before


def in_use() -> bool:
    """Whether this runs inside `using`."""
    return _use.active
