"""Transforms on JAX."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import keras

from kmodels.core.types import Tree
from kmodels.transforms.engine import OUT_AXES, VALUE
from kmodels.transforms.trees import Join

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

# A body with a `custom_vjp` has no forward mode.
GENERIC = frozenset({"jvp", "hessian"})

VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def explain(error: Exception) -> str | None:
    """Returns why JAX could not trace a function, in one line; None for other errors."""
    text = str(error)
    if isinstance(error, VALUE_ERRORS):
        return VALUE
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return (
            "a traced tensor was kept outside of the function (in a variable or a global); return "
            "it, and call models by stateless_call"
        )
    if "Reverse-mode differentiation does not work for lax.while_loop" in text:
        return (
            "JAX has no reverse mode for a while_loop or a fori_loop whose length depends on a "
            "value; use scan, a fori_loop between Python's numbers, or jvp"
        )
    if "(jvp) to a custom_vjp function" in text:
        return "a function with a backward pass of its own has no forward mode; use grad or vjp"
    if "vmap out_axes" in text and "axis spec None" in text:
        return OUT_AXES
    return None


def value_and_grad(fun: Callable[..., Any], leaves: list[Any], has_aux: bool) -> Any:
    """(value, gradients) of a function of tensors; the value is what it returns, maybe a pair."""
    everything = tuple(range(len(leaves)))
    return jax.value_and_grad(fun, everything, has_aux)(*leaves)


def jvp(fun: Callable[..., Any], leaves: list[Any], tangents: list[Any]) -> Any:
    """(outputs, their derivatives, aux) of a function that returns (outputs, aux)."""
    return jax.jvp(fun, leaves, tangents, has_aux=True)


def vjp(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """(outputs, from cotangents to those of `leaves`, aux) of a function (outputs, aux)."""
    return jax.vjp(fun, *leaves, has_aux=True)


def hessian(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns a row of second derivatives for each leaf."""
    return jax.hessian(fun, tuple(range(len(leaves))))(*leaves)


def vmap(fun: Callable[..., Any], leaves: list[Any], axes: list[int | None], pair: bool) -> Any:
    """Returns a function's stacked results; of a pair only the first is stacked."""
    return jax.vmap(fun, in_axes=tuple(axes), out_axes=(0, None) if pair else 0)(*leaves)


def jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled by XLA."""
    return jax.jit(fun)


def trace(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns the jaxpr."""
    return jax.make_jaxpr(fun)(*leaves)


def show(form: "ClosedJaxpr") -> str:
    """Returns the text of a jaxpr."""
    return form.pretty_print(use_color=False)


def remat(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """`fun(*leaves)`, of which only the arguments are kept."""
    return jax.checkpoint(fun)(*leaves)


# This is not keras.ops.cond, which adds lines to the message of an error inside.
cond = jax.lax.cond
while_loop = keras.ops.while_loop
fori_loop = keras.ops.fori_loop


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Tree,
    slices: list[Any],
    join: Join,
    count: int,
    reverse: bool,
    unroll: bool | int,
) -> tuple[Any, Any]:
    """`jax.lax.scan`."""
    return jax.lax.scan(f, init, join(slices), count, reverse, unroll)
