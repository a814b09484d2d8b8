"""The protocol of `engine_<backend>.py`, bodies that several backends share, and their scope.

Functions take and return flat lists of tensors, `leaves`, which `trees` makes of arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import keras

from kmodels.core.dispatch import backend_module, generic_only
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees
from kmodels.transforms.trees import Join

Leaves = list[Tensor]
Function = Callable[..., Any]
# The trace of a function: a jaxpr, a graph module, a graph.
Form = Any


class TransformsBackend(Protocol):
    """Derivatives, mapping, compilation and control flow on one backend."""

    @property
    def GENERIC(self) -> frozenset[str]:
        """Names of the transforms under which ops use their generic bodies."""
        ...

    def explain(self, error: Exception) -> str | None:
        """Returns in one line why the backend could not trace a function; None for other errors."""
        ...

    def value_and_grad(self, fun: Function, leaves: Leaves, has_aux: bool) -> Any:
        """Returns (value, gradients); the value is what `fun` returns, with `has_aux` a pair."""
        ...

    def jvp(self, fun: Function, leaves: Leaves, tangents: Leaves) -> Any:
        """Returns (outputs, their derivatives, aux) of a function that returns (outputs, aux)."""
        ...

    def vjp(self, fun: Function, leaves: Leaves) -> Any:
        """Returns (outputs, cotangents to those of `leaves`, aux) of a function (outputs, aux)."""
        ...

    def hessian(self, fun: Function, leaves: Leaves) -> Any:
        """Returns a row of second derivatives for each leaf."""
        ...

    def vmap(self, fun: Function, leaves: Leaves, axes: list[int | None], pair: bool) -> Any:
        """Returns the stacked results; of a `pair` only the first is stacked."""
        ...

    def jit(self, fun: Function) -> Function:
        """Returns the function compiled."""
        ...

    def trace(self, fun: Function, leaves: Leaves) -> Form:
        """Returns the trace of the function."""
        ...

    def show(self, form: Form) -> str:
        """Returns the text of a trace."""
        ...

    def remat(self, fun: Function, leaves: Leaves) -> Any:
        """Returns `fun(*leaves)`, recomputing activations in the backward pass."""
        ...

    def cond(self, pred: Tensor, true_fn: Function, false_fn: Function, /) -> Any:
        """Returns the result of one of two functions without arguments, by a scalar."""
        ...

    def while_loop(
        self, cond: Function, body: Function, loop_vars: Tree, maximum_iterations: int | None = None
    ) -> Any:
        """Repeats `loop_vars = body(*loop_vars)` while `cond(*loop_vars)`."""
        ...

    def fori_loop(
        self,
        lower: int | Tensor,
        upper: int | Tensor,
        body_fun: Callable[[Any, Any], Any],
        init_val: Tree,
    ) -> Any:
        """Repeats `val = body_fun(i, val)` for i from `lower` to `upper` - 1."""
        ...

    def scan(
        self,
        f: Callable[[Any, Any], tuple[Any, Any]],
        init: Tree,
        slices: Leaves,
        join: Join,
        count: int,
        reverse: bool,
        unroll: bool | int,
    ) -> tuple[Any, Any]:
        """Repeats `carry, y = f(carry, x)` for `count` slices, which `join` makes of theirs."""
        ...


# Errors of more than one backend.
VALUE = (
    "Python asked for the value of a traced tensor (by if, while, int(), .item(), or a recursion "
    "that depends on it); use cond, while_loop or fori_loop of kmodels.transforms"
)
RECURSION = (
    "the function calls itself without end while it is traced, as cond traces both branches; write "
    "a recursion that depends on a value as while_loop or fori_loop"
)
OUT_AXES = "out_axes is None for a result that depends on what is mapped; give an axis"


def unrolled(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Tree,
    slices: list[Any],
    join: Join,
    count: int,
    reverse: bool,
    unroll: bool | int,
) -> tuple[Any, Any]:
    """`scan` as a loop in Python; `join` makes `xs` of `slices`, its leaves."""
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
    """`cond` for a mapped `pred`: both functions run, and each entry selects one result."""
    return trees.mapped(lambda yes, no: keras.ops.where(pred, yes, no), true_fn(), false_fn())


# Last, since the files of the backends import what is above.
engine = backend_module("kmodels.transforms.engine", TransformsBackend)


@contextmanager
def tracing(name: str) -> Iterator[None]:
    """Surrounds the functions that a transform of this name runs.

    Raises:
        InputError: for functions that the backend cannot trace.
    """
    try:
        with generic_only() if name in engine.GENERIC else nullcontext():
            yield
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{name}: {RECURSION}") from None
    except Exception as error:
        reason = engine.explain(error)
        if reason is None:
            raise
        raise InputError(f"{name}: {reason}") from error
