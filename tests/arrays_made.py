"""The shapes of all arrays that a function and its gradients make, on whichever backend runs."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

BACKEND = keras.backend.backend()


def shapes_made(function: Callable[..., Any], *tensors: Any, gradients: bool = True) -> set[tuple]:
    """Shapes in the jaxpr, in the graph, or of what torch's kernels return.

    With `gradients`, those of a backward pass by each of the tensors too.
    """
    if BACKEND == "torch":
        return _of_torch(function, tensors, gradients)
    if BACKEND == "jax":
        import jax

        def run(*values: Any) -> Any:
            with keras.StatelessScope():
                if not gradients:
                    return function(*values)
                output, pull = jax.vjp(function, *values)
                return pull(jax.numpy.ones_like(output))

        return set(_of_jaxpr(jax.make_jaxpr(run)(*tensors).jaxpr))
    import tensorflow as tf

    @tf.function
    def step(*values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            output = function(*values)
        return tape.gradient(output, values) if gradients else output

    graph = step.get_concrete_function(*tensors).graph
    graphs = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
    return {
        tuple(x.shape)
        for one in graphs
        for operation in one.get_operations()
        for x in operation.outputs
        if x.shape.rank is not None
    }


def squares(shapes: set[tuple], length: int) -> list[tuple]:
    """Those with two axes of at least this length."""
    return [shape for shape in shapes if sum((size or 0) >= length for size in shape) > 1]


def _of_torch(function: Callable[..., Any], tensors: Any, gradients: bool) -> set[tuple]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found: set[tuple] = set()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(made):
                if isinstance(x, torch.Tensor):
                    found.add(tuple(x.shape))
            return made

    with Recorder():
        if gradients:
            tensors = [x.detach().requires_grad_(True) for x in tensors]
            torch.autograd.grad(function(*tensors).sum(), tensors)
        else:
            with torch.no_grad():
                function(*tensors)
    return found


def _of_jaxpr(jaxpr: Any) -> Iterator[tuple]:
    import jax

    for equation in jaxpr.eqns:
        for x in equation.outvars:
            yield tuple(x.aval.shape)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _of_jaxpr(inner)
