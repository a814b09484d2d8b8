"""Transforms on torch."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.checkpoint import checkpoint

from kmodels.core import internals_torch
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.transforms.engine import OUT_AXES, RECURSION, VALUE, chosen, unrolled

# A body with an `autograd.Function` of its own, or that writes in place, cannot be transformed.
GENERIC = frozenset({"grad", "value_and_grad", "jvp", "vjp", "hessian", "vmap"})


def explain(error: Exception) -> str | None:
    """Returns why torch could not trace a function, in one line; None for other errors."""
    text = str(error)
    if _unknown(error) or _mapped(error) or ".numpy() is not supported" in text:
        return VALUE
    if "RecursionError" in text:
        return RECURSION
    if "functorch tracing" in text:
        return (
            "torch cannot trace a loop whose length depends on a value inside vmap or a derivative "
            "under jit; use scan, or a fori_loop between Python's numbers"
        )
    if "saved tensor hooks" in text:
        return "torch.func has no rematerialisation by hooks; use kmodels.transforms.remat"
    if "setup_context staticmethod" in text or "generate_vmap_rule" in text:
        return "a torch.autograd.Function in it is not made for torch.func; write it with keras.ops"
    if "forward AD" in text:
        return "an operation in it has no forward mode on torch; use grad or vjp"
    if "out_dim" in text and "None" in text:
        return OUT_AXES
    return None


def _unknown(error: Exception) -> bool:
    """Returns whether a value was asked for while tracing."""
    return isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error)


def _mapped(error: Exception) -> bool:
    """Returns whether the value of a mapped tensor was asked for."""
    return "vmap: It looks like you're" in str(error)


def value_and_grad(fun: Callable[..., Any], leaves: list[Any], has_aux: bool) -> Any:
    """(value, gradients) of a function of tensors; the value is what it returns, maybe a pair."""
    everything = tuple(range(len(leaves)))
    gradients, results = torch.func.grad_and_value(fun, everything, has_aux)(*leaves)
    return results, gradients


def jvp(fun: Callable[..., Any], leaves: list[Any], tangents: list[Any]) -> Any:
    """(outputs, their derivatives, aux) of a function that returns (outputs, aux)."""
    _load_forward_mode()
    return torch.func.jvp(fun, tuple(leaves), tuple(tangents), has_aux=True)


def vjp(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """(outputs, from cotangents to those of `leaves`, aux) of a function (outputs, aux)."""
    return torch.func.vjp(fun, *leaves, has_aux=True)


def hessian(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns a row of second derivatives for each leaf."""
    _load_forward_mode()
    gradient = torch.func.grad(fun, tuple(range(len(leaves))))
    sizes = [x.numel() for x in leaves]
    # torch.func.hessian makes them with a tensor of sizes, which torch 2.11 cannot trace.
    units = torch.eye(sum(sizes), device=leaves[0].device).split(sizes, 1)
    directions = [unit.to(x).reshape(-1, *x.shape) for unit, x in zip(units, leaves, strict=True)]

    def along(*direction: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.func.jvp(gradient, tuple(leaves), direction)[1]

    return [
        [
            part.movedim(0, -1).reshape((*x.shape, *y.shape))
            for part, y in zip(column.split(sizes), leaves, strict=True)
        ]
        for column, x in zip(torch.func.vmap(along)(*directions), leaves, strict=True)
    ]


@cache
def _load_forward_mode() -> None:
    """Loads torch's forward mode, without its warning about an outdated part of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        internals_torch.load_forward_rules()


def vmap(fun: Callable[..., Any], leaves: list[Any], axes: list[int | None], pair: bool) -> Any:
    """Returns a function's stacked results; of a pair only the first is stacked."""
    mapping: Any = torch.func.vmap  # its declared types lack None
    return mapping(fun, tuple(axes), (0, None) if pair else 0, randomness="same")(*leaves)


def jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the graph of the first call, compiled on accelerators."""
    graph: Any = None

    def run(*leaves: torch.Tensor) -> Any:
        nonlocal graph
        if _inside_another():
            return fun(*leaves)
        if graph is None:
            graph = trace(fun, list(leaves))
            if torch.accelerator.is_available():
                graph = torch.compile(graph)
        return graph(*leaves)

    return run


def _inside_another() -> bool:
    """Returns whether torch is transforming or tracing already."""
    return internals_torch.in_transform() or get_proxy_mode() is not None


def trace(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns the graph of ATen operations, traced with fake tensors."""
    graph_module = internals_torch.trace_graph(fun, ZEROS, leaves)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: object) -> Any:
    return torch.zeros(size, dtype=dtype, device=device)


# Forward mode has zeros without memory, which turn into tensors of no device in a trace.
ZEROS: Any = {internals_torch.zero_without_memory(): _zeros}


def show(form: torch.fx.GraphModule) -> str:
    """Returns the code of a graph."""
    return form.print_readable(print_output=False)


def remat(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """`fun(*leaves)`, of which only the arguments are kept, outside of `torch.func`."""
    if _inside_another() or not torch.is_grad_enabled():
        return fun(*leaves)
    # See layers/remat_torch.py for `early_stop`.
    return checkpoint(fun, *leaves, use_reentrant=False, early_stop=False)


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Python's `if`, `torch.cond` for a traced value, or both functions if neither is possible."""
    if torch.compiler.is_dynamo_compiling():
        return _one_of(pred, true_fn, false_fn)
    try:
        value = bool(pred)
    except RuntimeError as error:
        if _mapped(error) or (_unknown(error) and internals_torch.in_transform()):
            return chosen(pred, true_fn, false_fn)
        if not _unknown(error):
            raise
    else:
        return true_fn() if value else false_fn()
    try:
        return _one_of(pred, true_fn, false_fn)
    except internals_torch.trace_error() as error:
        if "RecursionError" in str(error):
            raise
        # Dynamo, by which torch traces branches, does not know all of Python and keras.ops; a plain
        # trace of both does, and shows the function's own error if it has one.
        return chosen(pred, true_fn, false_fn)


def _one_of(pred: torch.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """`torch.cond`, which takes no results that are what came in, nor one tensor twice."""
    return torch.cond(
        pred,
        lambda: keras.tree.map_structure(_copy, true_fn()),
        lambda: keras.tree.map_structure(_copy, false_fn()),
    )


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Tree,
    maximum_iterations: int | None = None,
) -> Any:
    """Python's `while`, or torch's operation if the condition is traced."""
    alone = not isinstance(loop_vars, (tuple, list))
    state = (loop_vars,) if alone else tuple(loop_vars)
    state = keras.tree.map_structure(keras.ops.convert_to_tensor, state)
    try:
        bool(cond(*state))
    except RuntimeError as error:
        if _mapped(error):
            raise InputError(
                "while_loop: torch cannot map a loop whose length depends on what is mapped; use "
                "fori_loop for the longest, and choose by where"
            ) from None
        if not _unknown(error):
            raise
    else:
        return keras.ops.while_loop(cond, body, loop_vars, maximum_iterations)

    def proceed(count: torch.Tensor, *state: torch.Tensor) -> Any:
        more = cond(*state)
        return more if maximum_iterations is None else more & (count < maximum_iterations)

    def step(count: torch.Tensor, *state: torch.Tensor) -> Any:
        new = body(*state)
        new = (new,) if alone else tuple(new)
        # Copies, for torch takes no results that are what came in.
        return (count + 1, *keras.tree.map_structure(_copy, new))

    _, *state = internals_torch.while_loop(proceed, step, (keras.ops.zeros((), "int32"), *state))
    return state[0] if alone else tuple(state)


def _copy(leaf: torch.Tensor) -> torch.Tensor:
    return keras.ops.convert_to_tensor(leaf).clone()


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Tree) -> Any:
    """Python's loop between Python's numbers, else `while_loop`."""
    if isinstance(lower, int) and isinstance(upper, int):
        return keras.ops.fori_loop(lower, upper, body_fun, init_val)
    return while_loop(
        lambda i, _: i < upper, lambda i, val: (i + 1, body_fun(i, val)), (lower, init_val)
    )[1]


scan = unrolled
