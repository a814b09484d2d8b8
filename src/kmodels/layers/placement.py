"""The placement of a variable over devices: the family it belongs to, and how far it may be cut.

Families call the parts of a model by the same names, so a path alone does not say which family's
layout table applies. A layer takes the family of the model that is being made, and its variables
take that of the layer, also later ones: adapters, quantized kernels, tables of another size.

The outputs of a kernel that make one attention head belong together: cut apart, each product of
queries and keys would be a sum over devices. The shape alone does not show that (a kernel of one
key/value head has 256 columns), so the layer that makes a variable gives its granularity.

A variable is placed while it is made, before it can have attributes. So both stand in a ContextVar
meanwhile.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec

import keras

from kmodels.core import keras_internals

P = ParamSpec("P")
# Number of equal shards allowed for each dimension; None for its length.
Granularity = Sequence[int | None]

_family: ContextVar[str | None] = ContextVar("kmodels_layout_family", default=None)
_granularity: ContextVar[Granularity | None] = ContextVar("kmodels_shard_granularity", default=None)


@contextmanager
def _setting(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def of_family(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorates `__init__` of a backbone or task, whose variables belong to its family."""

    @functools.wraps(init)
    def inside(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        cls = type(self)
        owner = cls if hasattr(cls, "family") else getattr(cls, "backbone_class", cls)
        with _setting(_family, getattr(owner, "family", None)):
            init(self, *args, **kwargs)

    # Keras reads the signature of `__init__` without unwrapping it.
    inside.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return inside


def current_family() -> str | None:
    """Returns the family of the model that is being made; None outside of one."""
    return _family.get()


def family_of(variable: keras.Variable) -> str | None:
    """Returns the family of a variable, also while it is made; None if unknown."""
    return getattr(variable, "layout_family", None) or _family.get()


def granularity_of(variable: keras.Variable) -> Granularity | None:
    """Returns the granularity of a variable, also while it is made; None if unknown."""
    return getattr(variable, "shard_granularity", None) or _granularity.get()


def add_weight(layer: keras.Layer, granularity: Granularity | None, **settings: Any) -> Any:
    """Calls `layer.add_weight(**settings)` for a variable of the layer's family.

    `granularity` says how far the variable may be cut; None for as far as its length.
    """
    family = getattr(layer, "layout_family", None) or current_family()
    with _setting(_granularity, granularity), _setting(_family, family):
        if keras_internals.draws_later():
            with keras_internals.without_values():
                variable = layer.add_weight(**settings)
            keras_internals.draw_values([variable])
        else:
            variable = layer.add_weight(**settings)
    if granularity is not None:
        variable.shard_granularity = tuple(granularity)
    if family is not None:
        variable.layout_family = family
    return variable


class _Use(threading.local):
    """A thread's flag for reads inside a layer's call; torch.compile reads no ContextVar."""

    def __init__(self):
        self.active = False  # not on the class: see `kmodels.core.dispatch._Settled`


_use = _Use()


@contextmanager
def using() -> Iterator[None]:
    """Lets reads of variables inside the block count as reads inside a layer."""
    before, _use.active = _use.active, True
    try:
        yield
    finally:
        _use.active = before


def in_use() -> bool:
    """Returns True inside a `using` block."""
    return _use.active
