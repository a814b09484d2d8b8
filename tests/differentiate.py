"""Values and gradients of a function of arrays, on any backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


def value_and_gradients(
    function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], compiled: bool = False
) -> tuple[float, Any, list[np.ndarray]]:
    """(value, auxiliary, gradients by the arrays) of a function that returns (scalar, auxiliary)."""
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
