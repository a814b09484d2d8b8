"""Loops in Python for backends that have none of their own."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees


def unrolled(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Tree,
    slices: list[Any],
    join: trees.Join,
    count: int,
    reverse: bool,
    unroll: bool | int,
) -> tuple[Any, Any]:
    """`scan`; `slices` are the leaves of its `xs`, which `join` makes of them."""
    carry = init
    ys: list[Any] = []
    for index in reversed(range(count)) if reverse else range(count):
        carry, y = f(carry, join([x[index] for x in slices]))
        ys.append(trees.apart(y, numbers=True))
    if reverse:
        ys.reverse()
    columns = zip(*(tensors for tensors, _ in ys), strict=True)
    return carry, ys[0][1]([keras.ops.stack(list(column)) for column in columns])


def chosen(pred: Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """`cond` where `pred` is mapped: both run, and each entry takes from one."""
    return trees.mapped(lambda yes, no: keras.ops.where(pred, yes, no), true_fn(), false_fn())
