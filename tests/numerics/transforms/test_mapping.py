"""`vmap`: axes, and gradients per example of a vision transformer."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import kmodels
from kmodels.core import dispatch
from kmodels.layers.remat import rematerialize
from kmodels.models import ViTImageClassifier
from kmodels.transforms import grad, hessian, jit, jvp, vjp, vmap
from refusals import refused
from tolerances import tolerance

ROWS = np.array([[1.0, -1.0], [0.5, 2.0], [3.0, 1.0]], "float32")
PAIR = np.array([1.0, 2.0], "float32")


def to_numpy(x: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.stop_gradient(x))


def equal(found: Any, expected: Any) -> bool:
    found, expected = to_numpy(found), np.asarray(expected)
    scale = max(1.0, np.abs(expected).max())
    return (
        found.shape == expected.shape
        and np.abs(found - expected).max() <= tolerance("transforms") * scale
    )


def test_axes() -> None:
    def fun(tree: Any, y: Any) -> Any:
        return tree["a"] + y, {"whole": tree["b"] * 2, "part": ops.sum(tree["a"])}

    mapped = vmap(fun, in_axes=({"a": 1, "b": None}, -1), out_axes=(-1, {"whole": None, "part": 0}))
    total, rest = mapped({"a": ROWS, "b": ROWS}, PAIR)
    assert equal(total, ROWS + PAIR)
    assert equal(rest["whole"], ROWS * 2)
    assert equal(rest["part"], ROWS.sum(0))


def test_keywords_numbers_and_lists() -> None:
    assert equal(vmap(lambda *, x: ops.sum(x))(x=ROWS), ROWS.sum(1))
    double, one, nothing = vmap(lambda f, x: (f * x, 1.0, None), in_axes=[None, 0])(2.0, ROWS)
    assert equal(double, ROWS * 2) and equal(one, np.ones(3)) and nothing is None


def test_nested() -> None:
    outer = vmap(vmap(lambda a, b: a * b, in_axes=(0, None)), in_axes=(None, 0))
    assert equal(outer(PAIR, ROWS[:, 0]), np.outer(ROWS[:, 0], PAIR))
    slope = jvp(lambda w: vmap(lambda x: x * w)(ROWS), (2.0,), (1.0,))[1]
    assert equal(slope, ROWS)
    assert equal(grad(lambda x: ops.sum(vmap(ops.sin)(x)))(ROWS), np.cos(ROWS))


def test_second_derivatives_per_row() -> None:
    expected = [[[0, 1], [1, 0]]] * 3
    mapped = vmap(hessian(ops.prod))
    assert equal(mapped(ROWS), expected)
    assert equal(jit(mapped)(ROWS), expected)


def test_a_map_of_what_pulls_back_is_the_jacobian() -> None:
    _, pull = vjp(ops.sin, PAIR)
    assert equal(vmap(lambda v: pull(v)[0])(np.eye(2, dtype="float32")), np.diag(np.cos(PAIR)))


def test_random_numbers_are_the_same_for_all() -> None:
    generator = keras.random.SeedGenerator(0)

    def drop(x: Any, state: Any) -> Any:
        with keras.StatelessScope([(generator.state, state)]):
            return keras.random.dropout(x, 0.5, seed=generator)

    state = to_numpy(generator.state.value)
    found = to_numpy(vmap(drop, in_axes=(0, None))(np.ones((3, 32), "float32"), state))
    assert {0.0, 2.0} == set(found.ravel())
    assert (found == found[0]).all()


@pytest.fixture(scope="module")
def classifier() -> Any:
    keras.utils.set_random_seed(0)
    return ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)


def test_gradients_per_example(classifier: Any) -> None:
    """As one call, as a jitted one, and by Python's loop."""
    weights = [variable.value for variable in classifier.trainable_variables]
    states = [variable.value for variable in classifier.non_trainable_variables]
    rng = np.random.default_rng(0)
    images = rng.normal(size=(3, 16, 16, 3)).astype("float32")
    labels = np.array([2, 0, 1], "int32")

    def loss(weights: Any, image: Any, label: Any) -> Any:
        logits, _ = classifier.stateless_call(weights, states, image[None])
        return ops.logsumexp(logits[0]) - ops.take(logits[0], label)

    mapped = vmap(grad(loss), in_axes=(None, 0, 0))
    dispatch.reset_decisions()
    found = jit(mapped)(weights, images, labels)
    assert [tuple(x.shape) for x in found] == [(3, *variable.shape) for variable in weights]
    counts = kmodels.decisions()["dense"]
    if keras.backend.backend() == "torch":
        assert counts["generic"] and not counts["override"]
    slope = jit(grad(loss))
    rows = [slope(weights, image, label) for image, label in zip(images, labels, strict=True)]
    for place, gradient in enumerate(found):
        assert equal(gradient, np.stack([to_numpy(row[place]) for row in rows]))
    if keras.backend.backend() == "jax":
        return  # which compiles every operation by itself where it is not told to trace
    eager = mapped(weights, images, labels)
    assert all(equal(x, to_numpy(y)) for x, y in zip(eager, found, strict=True))


def test_gradients_of_a_rematerialized_model(classifier: Any) -> None:
    """What a backend cannot compute again inside a transform is kept, and no gradient is lost."""
    weights = [ops.convert_to_tensor(to_numpy(v.value)) for v in classifier.trainable_variables]
    states = [variable.value for variable in classifier.non_trainable_variables]
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")

    def loss(weights: Any) -> Any:
        logits, _ = classifier.stateless_call(weights, states, images, training=True)
        return ops.sum(logits**2)

    expected = jit(grad(loss))(weights)
    rematerialize(classifier, "block")
    try:
        found = jit(grad(loss))(weights)
    finally:
        rematerialize(classifier, "none")
    assert all(equal(x, to_numpy(y)) for x, y in zip(found, expected, strict=True))
    assert all(np.abs(to_numpy(x)).max() > 0 for x in found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vmap(ops.add)(ROWS, PAIR), "the mapped axes have the sizes 2, 3"),
        (lambda: vmap(ops.sin, in_axes=None)(ROWS), "in_axes maps no argument"),
        (lambda: vmap(ops.sin, in_axes=(0, 0))(ROWS), "but 1 positional arguments are given"),
        (lambda: vmap(len, in_axes=({"b": 0},))({"a": ROWS}), "in_axes is .* does not fit"),
        (lambda: vmap(ops.sin, in_axes=2)(ROWS), r"axis 2 of shape \(3, 2\)"),
        (lambda: vmap(ops.sin, in_axes="0")(ROWS), "holds '0'; give whole numbers or None"),
        (lambda: vmap(ops.sin)(1.0), "axis 0 of float"),
        (lambda: vmap(ops.sin, out_axes=3)(ROWS), "out_axes asks for axis 3"),
        (lambda: vmap(ops.sin, out_axes=(0, 0))(ROWS), "out_axes is .* does not fit"),
        (lambda: vmap(ops.sin, out_axes=None)(ROWS), "out_axes is None for a result that depends"),
        (lambda: vmap(lambda x: x if x > 0 else -x)(PAIR), "Python asked for the value"),
    ],
)
def test_wrong_use(call: Any, message: str) -> None:
    refused(message, call)
