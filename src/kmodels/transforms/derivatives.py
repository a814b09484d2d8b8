"""Derivatives in reverse mode, forward mode, and both."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras

from kmodels.core.arguments import checked
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor, Tree
from kmodels.transforms import trees
from kmodels.transforms.engine import engine, tracing

Function = Callable[..., Any]


@checked
def grad(fun: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Function:
    """Returns the gradient of a function that returns a scalar.

    Args:
        fun: takes tensors or trees of them; returns a scalar, with `has_aux` a pair of a scalar and
            anything else.
        argnums: positional argument, or arguments, to differentiate by; floats.
        has_aux: True if `fun` returns such a pair.

    Returns:
        A function of the same arguments. It returns the gradient, of the structure, shapes and
        dtypes of the argument, a tuple of them for a tuple of `argnums`; with `has_aux` a pair of
        that and the aux of `fun`.

    Raises:
        InputError: when called, for arguments that are not floats, results that are no scalar, and
            what the backend cannot trace.

    Example:
        >>> grad(lambda a, b: a * b)(1.5, 2.5)  # 2.5
    """
    both = _value_and_grad(fun, argnums, has_aux, "grad")

    @wraps(fun)
    def gradient(*args: Tree, **kwargs: Tree) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


@checked
def value_and_grad(
    fun: Function, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Function:
    """Returns value and gradient: (value, gradient), or ((value, aux), gradient); see `grad`.

    Args:
        fun: see `grad`.
        argnums: see `grad`.
        has_aux: see `grad`.

    Returns:
        A function of the same arguments.

    Raises:
        InputError: see `grad`.
    """
    return _value_and_grad(fun, argnums, has_aux, "value_and_grad")


def _value_and_grad(
    fun: Function, argnums: int | tuple[int, ...], has_aux: bool, name: str
) -> Function:
    @wraps(fun)
    def transformed(*args: Tree, **kwargs: Tree) -> Any:
        leaves, join, call = _chosen(fun, argnums, args, kwargs, name)
        rest: list[trees.Join] = []

        def flat(*leaves: Tensor) -> Any:
            if not has_aux:
                return _scalar(call(leaves), name)
            value, aux = _pair(call(leaves), name)
            tensors, put = trees.apart(aux)
            rest.append(put)
            return _scalar(value, name), tensors

        with tracing(name):
            value, gradients = engine.value_and_grad(flat, leaves, has_aux)
        if has_aux:
            value, aux = value
            value = value, rest[-1](aux)
        return value, join(gradients)

    return transformed


def hessian(fun: Function, argnums: int | tuple[int, ...] = 0) -> Function:
    """Returns the Hessian of a scalar function, by forward over reverse mode.

    For products with a vector, `jvp(grad(fun), (x,), (v,))` does without the matrix.

    Args:
        fun: see `grad`.
        argnums: see `grad`.

    Returns:
        A function of the same arguments. For a tensor of shape s it returns one of shape s + s; for
        a tree, a tree that holds such a tree at each leaf, of shapes s_i + s_j.

    Raises:
        InputError: see `grad`.
    """

    @wraps(fun)
    def transformed(*args: Tree, **kwargs: Tree) -> Any:
        leaves, join, call = _chosen(fun, argnums, args, kwargs, "hessian")

        def flat(*leaves: Tensor) -> Any:
            return _scalar(call(leaves), "hessian")

        with tracing("hessian"):
            rows = engine.hessian(flat, leaves)
        return join([join(list(row)) for row in rows])

    return transformed


@checked
def jvp(fun: Function, primals: tuple, tangents: tuple, has_aux: bool = False) -> tuple[Any, ...]:
    """Returns the value and the directional derivative, in forward mode.

    Args:
        fun: takes tensors or trees of them, returns the like; with `has_aux` a pair of that and
            anything else.
        primals: its arguments, floats.
        tangents: the direction, of the same structure and shapes.
        has_aux: whether `fun` returns a pair.

    Returns:
        The value and its derivative along the tangents, and with `has_aux` the rest.

    Raises:
        InputError: if tangents and primals differ in form, and for functions that the backend
            cannot trace.
    """
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise InputError("jvp: primals and tangents are tuples with one entry per argument")
    leaves, join = trees.floats(tuple(primals), "jvp: primals")
    directions = trees.like(tuple(tangents), leaves, join, "jvp: tangents")
    run = _Run(fun, join, has_aux, "jvp")
    with tracing("jvp"):
        outputs, slopes, aux = engine.jvp(run, leaves, directions)
    results = run.join(outputs), run.join(slopes)
    return (*results, run.rest(aux)) if has_aux else results


@checked
def vjp(fun: Function, *primals: Tree, has_aux: bool = False) -> tuple[Any, ...]:
    """Returns the value, and a function that pulls back cotangents, in reverse mode.

    Args:
        fun: takes tensors or trees of them, returns the like; with `has_aux` a pair of that and
            anything else.
        *primals: its arguments, floats.
        has_aux: whether `fun` returns a pair.

    Returns:
        The value and a function from a cotangent, of the value's structure and shapes, to a tuple
        with one entry per argument; with `has_aux` also the rest. It can be called repeatedly.

    Raises:
        InputError: if a cotangent differs from the value in form, and for functions that the
            backend cannot trace.
    """
    leaves, join = trees.floats(primals, "vjp: primals")
    run = _Run(fun, join, has_aux, "vjp")
    with tracing("vjp"):
        outputs, pull, aux = engine.vjp(run, leaves)

    def pulled(cotangent: Tree) -> Any:
        cotangents = trees.like(cotangent, outputs, run.join, "vjp: cotangents")
        with tracing("vjp"):
            return join(list(pull(cotangents)))

    results = run.join(outputs), pulled
    return (*results, run.rest(aux)) if has_aux else results


class _Run:
    """A function of flat lists that records the structure of its result."""

    join: trees.Join
    rest: trees.Join

    def __init__(self, fun: Function, join: trees.Join, has_aux: bool, name: str) -> None:
        self.fun, self.arguments, self.has_aux, self.name = fun, join, has_aux, name

    def __call__(self, *leaves: Tensor) -> tuple[list[Any], list[Any]]:
        output = self.fun(*self.arguments(list(leaves)))
        output, aux = _pair(output, self.name) if self.has_aux else (output, None)
        tensors, self.join = trees.apart(output, numbers=True)
        rest, self.rest = trees.apart(aux)
        return tensors, rest


def _chosen(
    fun: Function, argnums: int | tuple[int, ...], args: tuple, kwargs: dict, name: str
) -> tuple[list[Any], Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns the leaves to differentiate by, a function that joins them, and a call with new ones.

    The joined trees are a tuple if `argnums` is one.
    """
    alone = not isinstance(argnums, (tuple, list))
    places = [argnums] if alone else list(argnums)
    for place in places:
        if not -len(args) <= place < len(args):
            raise InputError(
                f"{name}: argnums is {argnums}, but {len(args)} positional arguments are given"
            )
    places = [place % len(args) for place in places]
    said = f"{name}: argument {', '.join(map(str, places))}"
    leaves, join = trees.floats(tuple(args[place] for place in places), said)
    others = [None if i in places else trees.taken(x) for i, x in enumerate(args)]
    named = trees.taken(kwargs) if kwargs else kwargs

    def call(leaves: Sequence[Any]) -> Any:
        filled = list(others)
        for place, value in zip(places, join(leaves), strict=True):
            filled[place] = value
        return fun(*filled, **named)

    return leaves, (lambda found: join(found)[0]) if alone else join, call


def _pair(output: Tree, name: str) -> tuple[Any, Any]:
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise InputError(f"{name}: with has_aux the function returns a pair, (value, aux)")
    return output[0], output[1]


def _scalar(value: Tensor, name: str) -> Any:
    scalar = value if keras.ops.is_tensor(value) else trees.taken(value, numbers=True)
    if not keras.ops.is_tensor(scalar):
        raise InputError(f"{name}: the function returns {type(value).__name__}; return a scalar")
    if tuple(scalar.shape) != () or "float" not in str(scalar.dtype):
        raise InputError(
            f"{name}: the function returns {keras.backend.standardize_dtype(scalar.dtype)} of "
            f"shape {tuple(scalar.shape)}; return a scalar of floats, such as a sum or a mean"
        )
    return scalar
