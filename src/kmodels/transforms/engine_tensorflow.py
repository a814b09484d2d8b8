"""Transforms on TensorFlow."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.transforms.engine import OUT_AXES, VALUE, chosen
from kmodels.transforms.trees import Join, apart

_mapping: ContextVar[bool] = ContextVar("kmodels_mapping", default=False)
ZERO = tf.UnconnectedGradients.ZERO
# TensorFlow can map and differentiate all overrides, but with oneDNN a ViT's, mapped over 256
# images, ended the process; the generic path did not.
GENERIC = frozenset({"hessian", "vmap"})


def explain(error: Exception) -> str | None:
    """Returns why TensorFlow could not trace a function, in one line; None for other errors."""
    text = str(error)
    if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
        return VALUE
    if "symbolic tf.Tensor" in text or "SymbolicTensor" in text:
        return VALUE
    if "Input dims must be <= 5" in text:
        return (
            "a softmax of TensorFlow's oneDNN has at most five axes, the mapped one included; set "
            "TF_ENABLE_ONEDNN_OPTS=0 before Keras is imported"
        )
    if "recompute_grad tried to transpose" in text:
        return "TensorFlow has no forward mode through remat; leave remat out, or use grad or vjp"
    if "variant" in text or "while vectorizing the jacobian" in text:
        return (
            "TensorFlow cannot transform this loop; give scan unroll=True, or differentiate the "
            "sum of a mapped function instead of mapping a gradient"
        )
    return None


def value_and_grad(fun: Callable[..., Any], leaves: list[Any], has_aux: bool) -> Any:
    """(value, gradients) of a function of tensors; the value is what it returns, maybe a pair."""
    leaves = _apart(leaves)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(leaves)
        results = fun(*leaves)
        value = results[0] if has_aux else results
    return results, _dense(tape.gradient(value, leaves, unconnected_gradients=ZERO))


def _apart(leaves: list[Any]) -> list[Any]:
    """Makes new tensors: a tape that watched an outer transform's would differentiate by both."""
    return [tf.identity(leaf) for leaf in leaves]


def _dense(gradients: list[Any]) -> list[Any]:
    """Returns those of rows that were looked up come as indices and values."""
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def jvp(fun: Callable[..., Any], leaves: list[Any], tangents: list[Any]) -> Any:
    """(outputs, their derivatives, aux) of a function that returns (outputs, aux)."""
    leaves = _apart(leaves)
    with tf.autodiff.ForwardAccumulator(leaves, tangents) as forward:
        outputs, aux = fun(*leaves)
    return outputs, [forward.jvp(x, unconnected_gradients=ZERO) for x in outputs], aux


def vjp(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """(outputs, from cotangents to those of `leaves`, aux) of a function (outputs, aux)."""
    leaves = _apart(leaves)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(leaves)
        outputs, aux = fun(*leaves)

    def pull(cotangents: list[Any]) -> list[Any]:
        slopes = tape.gradient(outputs, leaves, cotangents, unconnected_gradients=ZERO)
        return _dense(slopes)

    return outputs, pull, aux


def hessian(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns a row of second derivatives for each leaf."""

    def run(*leaves: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(leaves)
            _, gradients = value_and_grad(fun, list(leaves), False)
        return [tape.jacobian(g, leaves, unconnected_gradients=ZERO) for g in gradients]

    return _staged(run, _apart(leaves))


def _staged(run: Callable[..., Any], leaves: list[Any]) -> Any:
    """`run(*leaves)` as a graph, which TensorFlow's vectorisation would make of it anyway.

    It would do so under AutoGraph, which rewrites errors, and log that it does so each time.
    """
    if not tf.executing_eagerly():
        return run(*leaves)
    leaves = [tf.convert_to_tensor(leaf) for leaf in leaves]
    return _graph(run, leaves)(*leaves)


def vmap(fun: Callable[..., Any], leaves: list[Any], axes: list[int | None], pair: bool) -> Any:
    """Returns a function's stacked results; of a pair only the first is stacked."""
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    whole = 0

    def entry(parts: Any) -> Any:
        nonlocal whole
        filled = list(leaves)
        for place, part in zip(mapped, parts, strict=True):
            filled[place] = part
        token = _mapping.set(True)
        try:
            stacked, alike = fun(*filled) if pair else (fun(*filled), [])
        finally:
            _mapping.reset(token)
        whole = len(alike)
        if any(_depends(tensor, parts) for tensor in alike):
            raise InputError(f"vmap: {OUT_AXES}")
        return [*stacked, *alike]

    first = [keras.ops.moveaxis(leaves[i], axes[i], 0) if axes[i] else leaves[i] for i in mapped]
    results = _staged(lambda *first: tf.vectorized_map(entry, list(first)), first)
    count = len(results) - whole
    return (results[:count], [tensor[0] for tensor in results[count:]]) if pair else results


def _depends(tensor: tf.Tensor, parts: list[Any]) -> bool:
    """Returns whether a tensor of a graph is made of any of these."""
    sources, seen, waiting = {id(part.op) for part in parts}, set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if id(op) in sources:
            return True
        if id(op) not in seen:
            seen.add(id(op))
            waiting += [x.op for x in op.inputs]
    return False


def jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the graph of the first call; in a graph that is being made, a part of it."""
    graph: Any = None

    def run(*leaves: tf.Tensor) -> Any:
        nonlocal graph
        if not tf.executing_eagerly():
            return fun(*leaves)
        leaves = tuple(tf.convert_to_tensor(leaf) for leaf in leaves)
        if graph is None:
            graph = _graph(fun, leaves)
        return graph(*leaves)

    return run


def _graph(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """Returns a `tf.function` for one kind of arguments, which it does not check again."""
    return tf.function(fun, autograph=False).get_concrete_function(*leaves)


def trace(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """Returns the graph."""
    return _graph(fun, leaves).graph


def show(form: tf.Graph) -> str:
    """Returns a line for each node: name, type, inputs and outputs; then the bodies of loops."""
    lines = [
        f"{op.name} = {op.type}({', '.join(x.name for x in op.inputs)})"
        + "".join(f" : {x.dtype.name}{x.shape}" for x in op.outputs)
        for op in form.get_operations()
    ]
    for function in form.as_graph_def().library.function:
        lines.append(f"\n{function.signature.name}")
        lines += [f"  {x.name} = {x.op}({', '.join(x.input)})" for x in function.node_def]
    return "\n".join(lines)


def remat(fun: Callable[..., Any], leaves: list[Any]) -> Any:
    """`tf.recompute_grad`, whose function's gradients go by its arguments alone."""
    if any(x.dtype.is_floating for x in _graph(fun, leaves).captured_inputs):
        raise InputError(
            "remat: the function uses tensors that are not its arguments, whose gradients "
            "TensorFlow would lose; make them arguments"
        )
    return tf.recompute_grad(fun)(*leaves)


def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """`tf.cond`; both inside of `vmap`, where TensorFlow cannot go back through different branches.

    Differs from `keras.ops.cond`, which adds lines to the message of an error inside.
    """
    if not tf.is_symbolic_tensor(pred):
        return true_fn() if pred else false_fn()
    if _mapping.get():
        return chosen(pred, true_fn, false_fn)
    return tf.cond(pred, true_fn, false_fn)


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
    """`tf.scan`, over carries and ys."""
    carry, put = apart(init)
    structure: list[Join] = []

    def step(state: Any, parts: Any) -> Any:
        carry, y = f(put(list(state[0])), join(list(parts) if slices else []))
        ys, put_ys = apart(y, numbers=True)
        structure.append(put_ys)
        return apart(carry, numbers=True)[0], ys

    parts = slices or [tf.range(count)]
    # Tracing a step tells what comes out; TensorFlow's loops want to know it first.
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in carry]
    first = [tf.TensorSpec(x.shape[1:], x.dtype) for x in parts]
    traced = tf.function(step, autograph=False).get_concrete_function((specs, []), first)
    ys = [tf.zeros(x.shape, x.dtype) for x in traced.structured_outputs[1]]
    carries, ys = tf.scan(step, parts, (carry, ys), reverse=reverse)
    last = [x[0] if reverse else x[-1] for x in carries]
    return put(last), structure[-1](list(ys))
