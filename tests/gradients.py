"""Values and gradients of one function on whichever backend runs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")))


def value_and_grad(
    function: Callable[..., Any], *arrays: np.ndarray, dtype: str = "float32"
) -> tuple[Any, list[np.ndarray]]:
    """`function(*arrays)` and the gradients of its sum weighted by fixed numbers, by each array."""
    tensors = [keras.ops.cast(keras.ops.convert_to_tensor(x), dtype) for x in arrays]

    def total(output: Any) -> Any:
        shape = tuple(output.shape)
        weight = np.random.default_rng(7).normal(size=shape).astype("float32")
        weight = keras.ops.convert_to_tensor(weight)
        return keras.ops.sum(keras.ops.cast(output, "float32") * weight)

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
        (_, output), gradients = jax.value_and_grad(step, everything, has_aux=True)(*tensors)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
            loss = total(output)
        gradients = tape.gradient(loss, tensors)
    return output, [to_numpy(x) for x in gradients]
