"""How far a variable may be cut, told to whoever places it on devices.

The outputs of a kernel that make one attention head belong together: cut apart, each product of
queries and keys would be a sum over devices. The shape alone does not show that (a kernel of one
key/value head has 256 columns), so the layer that makes a variable says it.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

# By dimension: how many equal parts may lie apart; None for as many as the dimension is long.
Parts = Sequence[int | None]

_making: ContextVar[Parts | None] = ContextVar("kmodels_parts", default=None)


def add_weight(layer: Any, parts: Parts | None, **settings: Any) -> Any:
    """`layer.add_weight(**settings)` of a variable that has these parts.

    It gets its place while it is made, before it can carry anything itself.
    """
    token = _making.set(parts)
    try:
        variable = layer.add_weight(**settings)
    finally:
        _making.reset(token)
    if parts is not None:
        variable.parts = tuple(parts)
    return variable


def parts_of(variable: Any) -> Parts | None:
    """The parts of a variable that exists, or is being made; None where nobody said."""
    return getattr(variable, "parts", None) or _making.get()
