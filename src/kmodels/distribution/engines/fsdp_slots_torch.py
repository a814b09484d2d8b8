"""An optimizer's slots in parts: each is cut as its weight is, and never whole on any rank."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.distribution.engines.sharded_variable_torch import ShardedVariable, place_like


def place(optimizer: keras.Optimizer) -> None:
    """Has an optimizer make the slots of cut weights in parts when it is built.

    Args:
        optimizer: an optimizer of any class whose slots have the shapes of the weights.
    """
    if not optimizer.built and "build" not in vars(optimizer):
        vars(optimizer)["build"] = functools.partial(_build, optimizer, optimizer.build)


def _build(optimizer: keras.Optimizer, build: Callable[..., Any], variables: Sequence[Any]) -> None:
    """`build(variables)`.

    Raises:
        InputError: for slots of other shapes.
    """
    if optimizer.built:
        return
    refusal = InputError(
        f"{type(optimizer).__name__} keeps more than arrays of the weights' shapes, which fsdp "
        "cannot cut as the weights are; use AdamW or SGD"
    )
    try:
        with keras_internals.without_values() as made:
            build(variables)
    except InputError:
        raise
    except ValueError as error:
        raise refusal from error  # it gives slots their values itself
    new = {id(variable): variable for variable in made}
    for slot, weight in _pairs(optimizer, variables):
        if new.pop(id(slot), None) is None or not isinstance(weight, ShardedVariable):
            continue
        if tuple(slot.shape) != tuple(weight.shape):
            raise refusal
        place_like(slot, weight)
    keras_internals.draw_values(new.values())


def _pairs(optimizer: keras.Optimizer, weights: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each slot with its weight: optimizers keep lists in the order of the weights."""
    for _, held in keras_internals.slot_lists(optimizer):
        yield from zip(held, weights, strict=True)
