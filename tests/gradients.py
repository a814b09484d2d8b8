"""Values and gradients of one function on whichever backend runs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    if keras.backend.standardize_dtype(x.dtype) != "float64":
        x = keras.ops.cast(x, "float32")
    return np.asarray(keras.ops.convert_to_numpy(x))


def value_and_grad(
    function: Callable[..., Any],
    *arrays: np.ndarray,
    dtype: str = "float32",
    compiled: bool = False,
) -> tuple[Any, list[np.ndarray]]:
    """`function(*arrays)` and the gradients of its sum weighted by fixed numbers, by each array.

    A function of many ops is `compiled` as one program on JAX, which spares one for each op.
    """
    tensors = [keras.ops.cast(keras.ops.convert_to_tensor(x), dtype) for x in arrays]

    def total(output: Any) -> Any:
        shape = tuple(output.shape)
        weight = np.random.default_rng(7).normal(size=shape).astype("float32")
        wide = "float64" if dtype == "float64" else "float32"
        weight = keras.ops.convert_to_tensor(weight, wide)
        return keras.ops.sum(keras.ops.cast(output, wide) * weight)

    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        tensors = [tensor.detach().clone().requires_grad_(True) for tensor in tensors]
        output = function(*tensors)
        gradients = torch.autograd.grad(total(output), tensors)
        output = output.detach()
    elif backend == "jax":
        import jax

        def step(*values: Any) -> Any:
            output = function(*values)
            return total(output), output

        everything = tuple(range(len(tensors)))
        differentiate = jax.value_and_grad(step, everything, has_aux=True)
        if compiled:
            differentiate = jax.jit(differentiate)
        (_, output), gradients = differentiate(*tensors)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
            loss = total(output)
        gradients = tape.gradient(loss, tensors)
    return output, [to_numpy(x) for x in gradients]


def second_derivative(
    function: Callable[..., Any], arrays: list[np.ndarray], mode: str = "reverse"
) -> list[np.ndarray]:
    """The gradients of the sum of squares of the gradients of a weighted sum of squares.

    With the mode "forward", the derivatives of the gradients in the direction of the arrays; with
    "graph", as a graph of TensorFlow. On JAX everything is compiled.
    """
    tensors = [keras.ops.convert_to_tensor(x) for x in arrays]
    backend = keras.backend.backend()

    def total(*values: Any) -> Any:
        output = function(*values)
        weight = np.random.default_rng(7).normal(size=tuple(output.shape)).astype("float32")
        return keras.ops.sum(output * output * keras.ops.convert_to_tensor(weight))

    def squares(gradients: Any) -> Any:
        return sum(keras.ops.sum(keras.ops.square(x)) for x in gradients)

    if backend == "torch":
        import torch

        tensors = [tensor.detach().clone().requires_grad_(True) for tensor in tensors]
        gradients = torch.autograd.grad(total(*tensors), tensors, create_graph=True)
        found = torch.autograd.grad(squares(gradients), tensors)
    elif backend == "jax":
        import jax

        everything = tuple(range(len(tensors)))

        def penalty(*values: Any) -> Any:
            return squares(jax.grad(total, everything)(*values))

        def forward(*values: Any) -> Any:
            return jax.jvp(jax.grad(total, everything), values, values)[1]

        run = jax.grad(penalty, everything) if mode == "reverse" else forward
        found = jax.jit(run)(*tensors)
    else:
        import tensorflow as tf

        def run(*values: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(values)
                with tf.GradientTape() as inner:
                    inner.watch(values)
                    value = total(*values)
                penalty = squares(inner.gradient(value, values))
            return outer.gradient(penalty, values)

        def forward(*values: Any) -> Any:
            with tf.autodiff.ForwardAccumulator(values, values) as accumulator:
                with tf.GradientTape() as tape:
                    tape.watch(values)
                    value = total(*values)
                gradients = tape.gradient(value, values)
            return accumulator.jvp(gradients)

        graph = tf.function(run, autograph=False)
        found = {"reverse": run, "forward": forward, "graph": graph}[mode](*tensors)
    return [to_numpy(x) for x in found]
