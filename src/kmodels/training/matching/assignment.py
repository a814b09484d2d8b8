"""The cheapest assignment of targets to predictions, inside a compiled step."""

from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module
from kmodels.core.types import Tensor


class AssignmentBackend(Protocol):
    """A backend whose steps run in Python, and can ask SciPy on the host."""

    def on_host(self, cost: Any, valid: Any) -> Any:
        """Returns what `linear_sum_assignment` returns, or None where SciPy is not there."""
        ...


_backend = backend_module("kmodels.training.matching.assignment", AssignmentBackend, optional=True)


def linear_sum_assignment(cost: Tensor, valid: Tensor) -> Any:
    """Assigns a column of its own to each valid row of every example, at the least total cost.

    A compiled step cannot call SciPy, so this is the method of shortest augmenting paths in
    `keras.ops`: each row in turn finds the cheapest path to a column that is free, all examples of
    a batch at a time. On torch, whose steps run in Python, SciPy does it on the host.

    Args:
        cost: floating (B, T, Q), finite.
        valid: bool (B, T); of more than Q valid rows the first Q are assigned.

    Returns:
        int32 (B, T), the column of each row; -1 for rows that have none.

    Source:
        Jonker and Volgenant 1987; Crouse 2016, which SciPy's function follows.
    """
    ops = keras.ops
    cost = ops.convert_to_tensor(cost)
    valid = ops.cast(valid, "bool")
    columns = cost.shape[2]
    first = ops.cumsum(ops.cast(valid, "int32"), axis=1) <= columns
    valid = ops.logical_and(valid, first)
    if _backend is not None and (found := _backend.on_host(cost, valid)) is not None:
        return found
    return by_paths(cost, valid)


def by_paths(cost: Tensor, valid: Tensor) -> Any:
    """Returns `linear_sum_assignment` by `keras.ops` alone."""
    ops = keras.ops
    batch, (rows, columns) = ops.shape(cost)[0], cost.shape[1:]
    dtype = keras.backend.standardize_dtype(cost.dtype)
    numbers = ops.arange(rows, dtype="int32")
    places = ops.arange(columns, dtype="int32")
    none = ops.full((batch, columns), -1, dtype="int32")
    never = ops.zeros((batch, columns), dtype="bool")
    far = ops.full((batch, columns), float("inf"), dtype=dtype)

    def at(x: Tensor, index: Tensor) -> Any:
        """Returns one number of each example, x (B, N) and index (B,)."""
        return ops.take_along_axis(x, ops.expand_dims(index, 1), axis=1)[:, 0]

    def one(index: Tensor, among: Tensor) -> Any:
        return ops.expand_dims(index, 1) == among

    def assign(number: Tensor, row_of: Tensor, u: Tensor, v: Tensor) -> tuple[Any, ...]:
        start = ops.zeros((batch,), "int32") + number
        todo = at(valid, start)

        def search(
            todo: Tensor,
            row: Tensor,
            column: Tensor,
            near: Tensor,
            before: Tensor,
            seen: Tensor,
            passed: Tensor,
            u: Tensor,
            v: Tensor,
        ) -> tuple[Any, ...]:
            """Looks on from one row, and goes to the nearest column that was not seen."""
            going = ops.expand_dims(todo, 1)
            index = ops.expand_dims(ops.expand_dims(row, 1), 2)
            whole = ops.tile(index, (1, 1, columns))
            own = ops.take_along_axis(cost, whole, axis=1)[:, 0]
            reduced = own - ops.expand_dims(at(u, row), 1) - v
            unseen = ops.logical_not(seen)
            better = ops.logical_and(ops.logical_and(unseen, reduced < near), going)
            near = ops.where(better, reduced, near)
            before = ops.where(better, ops.expand_dims(column, 1), before)
            open_ = ops.where(seen, far, near)
            nearest = ops.cast(ops.argmin(open_, axis=1), "int32")
            step = ops.expand_dims(ops.where(todo, ops.min(open_, axis=1), 0.0), 1)
            u = ops.where(passed, u + step, u)
            v = ops.where(seen, v - step, v)
            near = ops.where(seen, near, near - step)
            column = ops.where(todo, nearest, column)
            held = at(row_of, column)
            todo = ops.logical_and(todo, held >= 0)
            going = ops.expand_dims(todo, 1)
            seen = ops.logical_or(seen, ops.logical_and(one(column, places), going))
            passed = ops.logical_or(passed, ops.logical_and(one(held, numbers), going))
            row = ops.where(todo, held, row)
            return todo, row, column, near, before, seen, passed, u, v

        found = ops.while_loop(
            lambda todo, *_: ops.any(todo),
            search,
            (todo, start, start * 0 - 1, far, none, never, one(start, numbers), u, v),
        )
        column, before, u, v = found[2], found[4], found[7], found[8]

        def augment(todo: Tensor, column: Tensor, row_of: Tensor) -> tuple[Any, ...]:
            """Gives a column the row of the one before it on the path."""
            source = at(before, ops.maximum(column, 0))
            row = ops.where(source >= 0, at(row_of, ops.maximum(source, 0)), start)
            hit = ops.logical_and(one(column, places), ops.expand_dims(todo, 1))
            row_of = ops.where(hit, ops.expand_dims(row, 1), row_of)
            todo = ops.logical_and(todo, source >= 0)
            return todo, ops.where(todo, source, column), row_of

        held = ops.while_loop(
            lambda todo, *_: ops.any(todo), augment, (at(valid, start), column, row_of)
        )
        return number + 1, held[2], u, v

    zeros = ops.zeros((batch, rows), dtype=dtype), ops.zeros((batch, columns), dtype=dtype)
    row_of = ops.while_loop(
        lambda number, *_: number < rows,
        assign,
        (ops.convert_to_tensor(0, dtype="int32"), none, *zeros),
    )[1]
    matched = ops.expand_dims(row_of, 1) == ops.reshape(numbers, (1, rows, 1))  # (B, T, Q)
    found = ops.cast(ops.argmax(ops.cast(matched, "int32"), axis=2), "int32")
    return ops.where(ops.any(matched, axis=2), found, -1)
