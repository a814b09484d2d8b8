"""The granularity by which a variable may be sharded, and when its layer uses it.

The outputs of a kernel that make one attention head belong together: cut apart, each product of
queries and keys would be a sum over devices. The shape alone does not show that (a kernel of one
key/value head has 256 columns), so the layer that makes a variable says it.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.layers import layout_family

# Number of equal shards allowed for each dimension; None for its length.
Granularity = Sequence[int | None]

_making: ContextVar[Granularity | None] = ContextVar("kmodels_shard_granularity", default=None)


def add_weight(layer: keras.Layer, granularity: Granularity | None, **settings: Any) -> Any:
    """Calls `layer.add_weight(**settings)` for a variable with this granularity.

    A variable is placed on devices while it is made, before it can have attributes.
    """
    family = getattr(layer, "layout_family", None) or layout_family.current()
    token = _making.set(granularity)
    try:
        with layout_family.making(family):
            variable = _made(layer, settings)
    finally:
        _making.reset(token)
    if granularity is not None:
        variable.shard_granularity = tuple(granularity)
    if family is not None:
        variable.layout_family = family
    return variable


def _made(layer: keras.Layer, settings: dict[str, Any]) -> Any:
    if not keras_internals.draws_later():
        return layer.add_weight(**settings)
    with keras_internals.without_values():
        variable = layer.add_weight(**settings)
    keras_internals.draw_values([variable])
    return variable


def granularity_of(variable: keras.Variable) -> Granularity | None:
    """Returns the granularity of a variable, also while it is made; None if unknown."""
    return getattr(variable, "shard_granularity", None) or _making.get()


class _Use(threading.local):
    """A thread's flag for reads inside a layer's call; torch.compile reads no ContextVar."""

    active = False


_use = _Use()


@contextmanager
def using() -> Iterator[None]:
    """Lets reads inside the block count as reads inside a layer."""
    before, _use.active = _use.active, True
    try:
        yield
    finally:
        _use.active = before


def in_use() -> bool:
    """Returns True if this runs inside `using`."""
    return _use.active
