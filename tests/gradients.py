"""Values and gradients of one function on whichever backend runs."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    wide = keras.backend.standardize_dtype(x.dtype) == "float64"
    # JAX would compile a cast for each shape.
    if not wide and keras.backend.backend() != "jax":
        x = keras.ops.cast(x, "float32")
    values = np.asarray(keras.ops.convert_to_numpy(x))
    return values if wide else values.astype("float32")


def assert_near(found: Any, expected: Any, allowed: float) -> None:
    """Asserts that each array differs from the expected one, which is not zero, by little.

    A difference is at most `allowed` times the larger of 1 and the largest number expected.
    """
    for ours, right in zip(found, expected, strict=True):
        ours, right = to_numpy(ours), to_numpy(right)
        assert np.abs(right).max() > 0
        assert np.abs(ours - right).max() <= allowed * max(1.0, np.abs(right).max())


def first(found: Any) -> Any:
    """The result of an op that has gradients: `linear_cross_entropy` has a second one."""
    return found[0] if isinstance(found, tuple) else found


def value_and_grad(
    function: Callable[..., Any],
    *arrays: np.ndarray,
    dtype: str = "float32",
    compiled: bool = False,
) -> tuple[Any, list[np.ndarray]]:
    """`function(*arrays)` and the gradients of its sum weighted by fixed numbers, by each array.

    A function of many ops is `compiled` as one program on JAX, which spares one for each op.
    """
    wide = "float64" if dtype == "float64" else "float32"

    def total(*values: Any) -> tuple[Any, Any]:
        output = function(*values)
        weight = np.random.default_rng(7).normal(size=tuple(output.shape)).astype("float32")
        weight = keras.ops.convert_to_tensor(weight, wide)
        return keras.ops.sum(keras.ops.cast(output, wide) * weight), output

    tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
    compiled = compiled and keras.backend.backend() == "jax"
    _, output, gradients = _differentiate(total, tensors, compiled)
    return output, [to_numpy(x) for x in gradients]


def differences(run: Callable[..., Any], arrays: Sequence[np.ndarray]) -> None:
    """Asserts that the gradients of a function are the differences of its values.

    With random numbers in it that holds only if each call and each backward pass draws the same.
    """
    value, gradients = value_and_grad(run, *arrays)
    weight = np.random.default_rng(7).normal(size=tuple(value.shape)).astype("float32")

    def total(values: Sequence[np.ndarray]) -> float:
        output = to_numpy(run(*map(keras.ops.convert_to_tensor, values)))
        return float((output.astype("float64") * weight).sum())

    for i, gradient in enumerate(gradients):
        step = np.random.default_rng(i).normal(size=gradient.shape).astype("float32") * 1e-2
        up, down = (
            total([x + sign * step if i == j else x for j, x in enumerate(arrays)])
            for sign in (1, -1)
        )
        slope = float((gradient.astype("float64") * step).sum())
        assert abs(slope) > 1e-3
        assert abs((up - down) / 2 - slope) < 2e-3 * max(1.0, abs(slope))


def value_and_gradients(
    function: Callable[..., tuple[Any, Any]], arrays: Sequence[Any], compiled: bool = False
) -> tuple[float, Any, list[np.ndarray]]:
    """(value, rest, gradients by the arrays) of a function that returns (value, rest).

    The gradient by an array that plays no part is zero.
    """
    tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
    value, rest, gradients = _differentiate(function, tensors, compiled, unused=True)
    value = to_numpy(keras.ops.stop_gradient(value))
    return float(value), rest, [to_numpy(x) for x in gradients]


def _differentiate(
    function: Callable[..., tuple[Any, Any]],
    tensors: list[Any],
    compiled: bool,
    unused: bool = False,
) -> tuple[Any, Any, Any]:
    """(value, rest, gradients by the tensors), all of which play a part but with `unused`."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        tensors = [tensor.detach().clone().requires_grad_(True) for tensor in tensors]
        if compiled:
            torch.compiler.reset()  # each case of a test compiles the same code object
        run = torch.compile(function, backend="eager", fullgraph=True) if compiled else function
        value, rest = run(*tensors)
        gradients = torch.autograd.grad(value, tensors, materialize_grads=unused)
        return value, rest.detach(), gradients
    if backend == "jax":
        import jax

        run = jax.value_and_grad(function, tuple(range(len(tensors))), has_aux=True)
        (value, rest), gradients = (jax.jit(run) if compiled else run)(*tensors)
        return value, rest, gradients
    import tensorflow as tf

    def step(*values: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(values)
            value, rest = function(*values)
        absent = "zero" if unused else "none"
        return value, rest, tape.gradient(value, values, unconnected_gradients=absent)

    return (tf.function(step) if compiled else step)(*tensors)


def second_derivative(
    function: Callable[..., Any], arrays: list[np.ndarray], mode: str = "reverse"
) -> list[np.ndarray]:
    """The gradients of the sum of squares of the gradients of a weighted sum of squares.

    With the mode "forward", the derivatives of the gradients in the direction of the arrays, and
    with "along" the same without forward mode; with "graph", as a graph of TensorFlow. On JAX
    everything is compiled.
    """
    tensors = [keras.ops.convert_to_tensor(x) for x in arrays]
    backend = keras.backend.backend()

    def total(*values: Any) -> Any:
        output = function(*values)
        weight = np.random.default_rng(7).normal(size=tuple(output.shape)).astype("float32")
        return keras.ops.sum(output * output * keras.ops.convert_to_tensor(weight))

    def squares(gradients: Any) -> Any:
        others = arrays if mode == "along" else gradients
        return sum(keras.ops.sum(x * y) for x, y in zip(gradients, others, strict=True))

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

        run = forward if mode == "forward" else jax.grad(penalty, everything)
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
        found = {"forward": forward, "graph": graph}.get(mode, run)(*tensors)
    return [to_numpy(x) for x in found]


def trainable_gradients(model: Any) -> Any:
    """Returns a function of the mean cube of a model's output in training and its gradients.

    The function is compiled once, for any number of steps; a model that is changed needs a new one.
    """
    variables = model.trainable_weights

    def loss(output):
        return keras.ops.mean(output * output * output)

    if keras.backend.backend() == "jax":
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
    elif keras.backend.backend() == "torch":
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

    def run_step(x):
        value, gradients = step(x)
        by_path = {v.path: to_numpy(g) for v, g in zip(variables, gradients, strict=True)}
        return float(to_numpy(keras.ops.stop_gradient(value))), by_path

    return run_step
