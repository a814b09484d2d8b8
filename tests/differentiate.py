"""Values and gradients of a function of arrays, on any backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


def value_and_gradients(
    function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], compiled: bool = False
) -> tuple[float, Any, list[np.ndarray]]:
    """(value, rest, gradients by the arrays) of a function that returns (value, rest)."""
    backend = keras.backend.backend()
    inputs = [keras.ops.convert_to_tensor(array) for array in arrays]
    if backend == "jax":
        import jax

        run = jax.value_and_grad(function, argnums=tuple(range(len(inputs))), has_aux=True)
        (value, aux), gradients = (jax.jit(run) if compiled else run)(*inputs)
    elif backend == "torch":
        import torch

        inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        run = torch.compile(function, backend="eager", fullgraph=True) if compiled else function
        value, aux = run(*inputs)
        gradients = torch.autograd.grad(value, inputs, allow_unused=True)
    else:
        import tensorflow as tf

        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value, aux = function(*tensors)
            return value, aux, tape.gradient(value, tensors, unconnected_gradients="zero")

        value, aux, gradients = (tf.function(run) if compiled else run)(*inputs)
    found = [
        np.zeros(array.shape) if gradient is None else _numpy(gradient)
        for gradient, array in zip(gradients, inputs, strict=True)
    ]
    return float(_numpy(value)), aux, found


def _numpy(tensor: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.stop_gradient(tensor), "float32"))


def trainable_gradients(
    model: Any,
) -> Callable[[Any], tuple[float, dict[str, np.ndarray]]]:
    """What gives the mean cube of a model's output in training, and its gradients by path.

    It is compiled once, for any number of steps; a model that is changed needs a new one.
    """
    backend = keras.backend.backend()
    variables = model.trainable_weights

    def loss(output: Any) -> Any:
        return keras.ops.mean(output * output * output)

    if backend == "jax":
        import jax

        def run(values, states, x):
            output, states = model.stateless_call(values, states, x, training=True)
            return loss(output), states

        compiled = jax.jit(jax.value_and_grad(run, has_aux=True))

        def step(x):
            states = [variable.value for variable in model.non_trainable_variables]
            (value, states), gradients = compiled([v.value for v in variables], states, x)
            for variable, state in zip(model.non_trainable_variables, states, strict=True):
                variable.assign(state)
            return value, gradients
    elif backend == "torch":
        import torch

        def step(x):
            value = loss(model(x, training=True))
            return value, torch.autograd.grad(value, [v.value for v in variables])
    else:
        import tensorflow as tf

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                value = loss(model(x, training=True))
            return value, tape.gradient(value, [v.value for v in variables])

    def found(x: Any) -> tuple[float, dict[str, np.ndarray]]:
        value, gradients = step(x)
        by_path = {v.path: _numpy(g) for v, g in zip(variables, gradients, strict=True)}
        return float(_numpy(value)), by_path

    return found
