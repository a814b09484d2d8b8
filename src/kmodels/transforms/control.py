"""Branches and loops that can be traced. Arguments are those of `keras.ops`."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees
from kmodels.transforms.engine import engine, tracing, unrolled


def cond(pred: Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Calls one of two functions by a value; under `vmap` both run, and each entry selects one.

    Args:
        pred: a scalar, True or False.
        true_fn: takes nothing; returns a tensor or a tree of tensors.
        false_fn: the same, with results of the same structure, shapes and dtypes.

    Returns:
        The result of the chosen function.

    Raises:
        InputError: for functions that the backend cannot trace, such as a recursion by a value.
    """
    with tracing("cond"):
        return engine.cond(pred, true_fn, false_fn)


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Tree,
    maximum_iterations: int | None = None,
) -> Any:
    """Repeats `loop_vars = body(*loop_vars)` while `cond(*loop_vars)`.

    It has reverse-mode derivatives on torch (outside of `jit`) and TensorFlow, and forward-mode
    ones on all backends. On JAX use `fori_loop` or `scan`, whose lengths are known.

    Args:
        cond: takes the loop variables; returns a scalar, True or False.
        body: takes the loop variables; returns them, of the same structure, shapes and dtypes.
        loop_vars: a tuple of tensors or trees, or a single tensor.
        maximum_iterations: number of iterations after which the loop ends anyway.

    Returns:
        The last loop variables: a tuple, or a single tensor if that was given.

    Raises:
        InputError: for functions that the backend cannot trace.
    """
    with tracing("while_loop"):
        return engine.while_loop(cond, body, loop_vars, maximum_iterations)


def fori_loop(
    lower: int | Tensor, upper: int | Tensor, body_fun: Callable[[Any, Any], Any], init_val: Tree
) -> Any:
    """Repeats `val = body_fun(i, val)` for i from `lower` to `upper` - 1.

    Args:
        lower: a whole number, or a scalar tensor of whole numbers.
        upper: the same. The loop has derivatives on every backend if they are Python's numbers.
        body_fun: takes the index and the value; returns the value, of the same structure, shapes
            and dtypes.
        init_val: a tensor or a tree of tensors.

    Returns:
        The last value.

    Raises:
        InputError: for functions that the backend cannot trace.
    """
    with tracing("fori_loop"):
        init_val = trees.taken(init_val, numbers=True)
        if not (isinstance(lower, int) and isinstance(upper, int)):
            lower, upper = (keras.ops.cast(bound, "int32") for bound in (lower, upper))
        return engine.fori_loop(lower, upper, body_fun, init_val)


@checked
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Tree,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: bool | int = 1,
) -> tuple[Any, Any]:
    """Repeats `carry, y = f(carry, x)` for each x along the first axis.

    Args:
        f: takes the carry and a slice; returns the carry, of the same structure, shapes and dtypes,
            and a tensor, tree of tensors, or None.
        init: the first carry, a tensor or a tree of tensors.
        xs: a tensor or tree of tensors of one length L, or None.
        length: L, if `xs` is None.
        reverse: True to iterate from the last slice to the first.
        unroll: True unrolls the loop, which takes longer to compile; TensorFlow needs it inside
            `vmap(grad(...))` and inside `jvp` under `jit`, and torch always unrolls. A number is
            the unroll factor of JAX.

    Returns:
        The last carry, and the ys stacked along a new first axis (L, ...).

    Raises:
        InputError: without `xs` and `length`, if lengths differ, and for functions that the
            backend cannot trace.
    """
    init, xs = trees.taken(init, numbers=True), trees.taken(xs)
    slices, join = trees.apart(xs)
    lengths = {int(x.shape[0]) for x in slices}
    if length is not None:
        lengths.add(length)
    if len(lengths) != 1:
        raise InputError(
            f"scan: xs and length have the lengths {sorted(lengths)}; give one length"
            if lengths
            else "scan: neither xs nor length is given; give one of them"
        )
    (count,) = lengths
    check_whole("scan: the length", count)
    run = unrolled if unroll is True else engine.scan
    with tracing("scan"):
        return run(f, init, slices, join, count, reverse, unroll)
