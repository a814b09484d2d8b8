"""Derivatives: the textbook's numbers, NumPy's in float64, finite differences, and errors."""

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from kmodels.transforms import grad, hessian, jit, jvp, value_and_grad, vjp
from refusals import refused
from tolerances import tolerance

NUMBERS = st.floats(-2, 2, width=32)
FEW = settings(max_examples=8, deadline=None, derandomize=True)


def to_numpy(tree: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: ops.convert_to_numpy(ops.stop_gradient(x)) if ops.is_tensor(x) else x, tree
    )


def close(found: Any, expected: Any) -> bool:
    """Whether all leaves lie within the table's tolerance of values of their size."""
    pairs = zip(keras.tree.flatten(to_numpy(found)), keras.tree.flatten(expected), strict=True)
    return all(
        np.shape(x) == np.shape(y)
        and np.abs(x - y).max() <= tolerance("transforms") * max(1.0, np.abs(y).max())
        for x, y in pairs
    )


def cubic(x: Any) -> Any:
    return 2 * x**3 + 8


def perceptron(weights: dict[str, Any], x: Any) -> Any:
    hidden = ops.tanh(ops.matmul(x, weights["kernel"]) + weights["bias"][0])
    return ops.mean(ops.square(hidden)) * weights["bias"][1]


WEIGHTS = {
    "kernel": np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]], "float32"),
    "bias": [np.array([0.1, 0.0, -0.1], "float32"), np.float32(1.5)],
}
ROWS = np.array([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]], "float32")


def test_product() -> None:
    assert to_numpy(grad(lambda a, b: a * b)(1.5, 2.5)) == 2.5
    assert to_numpy(grad(lambda a, b: a * b, argnums=1)(1.5, 2.5)) == 1.5
    assert to_numpy(grad(lambda a, b: a * b, argnums=-1)(1.5, 2.5)) == 1.5


def test_derivative_of_derivative() -> None:
    value, slope = value_and_grad(cubic)(2.0)
    assert to_numpy(value) == 24
    assert to_numpy(slope) == 6 * 2**2
    assert to_numpy(grad(grad(cubic))(2.0)) == 12 * 2
    assert to_numpy(grad(grad(grad(cubic)))(2.0)) == 12


def test_dot_product() -> None:
    a, b = np.array([1.0, 2.0, 3.0], "float32"), np.array([4.0, 5.0, 6.0], "float32")
    found = grad(ops.dot, argnums=(0, 1))(a, b)
    assert isinstance(found, tuple)
    assert close(found, (b, a))


def test_inner_and_outer_variables_are_kept_apart() -> None:
    assert to_numpy(grad(lambda x: x * grad(lambda y: x + y)(1.0))(1.0)) == 1
    assert to_numpy(grad(lambda x: grad(lambda y: x * y)(x))(3.0)) == 1
    inner = jvp(lambda x: jvp(lambda y: x * y, (x,), (1.0,))[1], (3.0,), (1.0,))
    assert to_numpy(inner) == (3, 1)


def test_trees_keywords_and_aux() -> None:
    def loss(factor: Any, weights: Any, *, rows: Any) -> Any:
        value = factor * perceptron(weights, rows)
        return value, {"value": value, "name": "loss", "none": None}

    (value, aux), (slope, found) = value_and_grad(loss, (0, 1), has_aux=True)(
        2.0, WEIGHTS, rows=ROWS
    )
    assert aux["name"] == "loss" and aux["none"] is None
    assert to_numpy(aux["value"]) == to_numpy(value)
    assert close(slope, to_numpy(value) / 2)
    assert found.keys() == WEIGHTS.keys() and isinstance(found["bias"], list)

    hidden = np.tanh(ROWS.astype("float64") @ WEIGHTS["kernel"] + WEIGHTS["bias"][0])
    slope = 2 * 1.5 * 2 * hidden * (1 - hidden**2) / hidden.size
    expected = {"kernel": ROWS.T @ slope, "bias": [slope.sum(0), 2 * np.mean(hidden**2)]}
    assert close([found["kernel"], *found["bias"]], [expected["kernel"], *expected["bias"]])

    gradient, aux = grad(loss, has_aux=True)(2.0, WEIGHTS, rows=ROWS)
    assert close(gradient, to_numpy(value) / 2) and aux["name"] == "loss"


def test_variables_and_narrow_floats() -> None:
    variable = keras.Variable(np.array([1.0, 2.0], "float32"))
    assert close(grad(lambda x: ops.sum(x**2))(variable), np.array([2.0, 4.0]))
    narrow = ops.cast(ROWS, "bfloat16")
    found = grad(lambda x: ops.cast(ops.sum(x), "float32"))(narrow)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"


def test_what_does_not_matter_has_zeros() -> None:
    assert close(grad(lambda _: 1.0)(ROWS), np.zeros_like(ROWS))
    assert close(grad(lambda x, y: x, argnums=1)(1.0, ROWS), np.zeros_like(ROWS))
    assert close(hessian(lambda x: ops.sum(x) * 2)(ROWS[0]), np.zeros((2, 2)))
    assert close(jvp(lambda _: ops.ones(2), (ROWS,), (ROWS,))[1], np.zeros(2))


def test_rows_looked_up() -> None:
    found = grad(lambda table: ops.sum(ops.take(table, np.array([0, 0, 2]), axis=0)))(ROWS)
    assert close(found, np.array([[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]))


def test_forward_and_back_of_trees() -> None:
    def fun(a: Any, b: Any) -> Any:
        return {"product": a * b["x"], "sine": ops.sin(a)}, "rest"

    value, slope, rest = jvp(fun, (2.0, {"x": 3.0}), (1.0, {"x": 0.5}), has_aux=True)
    assert rest == "rest"
    assert close(value, {"product": 6.0, "sine": np.sin(2.0)})
    assert close(slope, {"product": 4.0, "sine": np.cos(2.0)})
    value, pull, rest = vjp(fun, 2.0, {"x": 3.0}, has_aux=True)
    assert rest == "rest"
    assert close(value, {"product": 6.0, "sine": np.sin(2.0)})
    assert close(pull({"product": 1.0, "sine": 0.0}), (3.0, {"x": 2.0}))
    assert close(pull({"product": 0.0, "sine": 1.0}), (np.cos(2.0), {"x": 0.0}))


@FEW
@given(x=st.tuples(NUMBERS, NUMBERS, NUMBERS), v=st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_against_numpy(x: Any, v: Any) -> None:
    """f = sum(sin x) * sum(x^2): value, gradient, its product with a vector, all in float64."""

    def fun(x: Any) -> Any:
        return ops.sum(ops.sin(x)) * ops.sum(x * x)

    x, v = np.array(x), np.array(v)
    sines, squares = np.sin(x).sum(), np.dot(x, x)
    gradient = np.cos(x) * squares + 2 * x * sines
    mixed = 2 * np.outer(np.cos(x), x)
    matrix = np.diag(2 * sines - np.sin(x) * squares) + mixed + mixed.T
    point, along = x.astype("float32"), v.astype("float32")
    value, found = value_and_grad(fun)(point)
    assert close([value, found], [np.float64(sines * squares), gradient])
    slope, product = jvp(grad(fun), (point,), (along,))
    assert close([slope, product], [gradient, matrix @ v])
    assert close(vjp(grad(fun), point)[1](along), (matrix @ v,))


def test_hessian_of_a_tree() -> None:
    def fun(weights: Any) -> Any:
        return perceptron(weights, ROWS)

    found = jit(hessian(fun))(WEIGHTS)
    assert to_numpy(found["kernel"]["kernel"]).shape == (2, 3, 2, 3)
    assert to_numpy(found["bias"][0]["kernel"]).shape == (3, 2, 3)
    assert close(found["bias"][1]["bias"][1], 0.0)
    turned = to_numpy(found["kernel"]["bias"][0]).transpose(2, 0, 1)
    assert close(found["bias"][0]["kernel"], turned)
    blocks = jit(hessian(lambda a, b: ops.sum(a) * b**2, argnums=(0, 1)))(ROWS[0], 3.0)
    assert close(blocks, ((np.zeros((2, 2)), np.full(2, 6.0)), (np.full(2, 6.0), 3 * -0.0)))


def test_hessian_times_vector_against_finite_differences() -> None:
    direction = {
        "kernel": np.array([[0.2, 0.1, -0.3], [0.4, -0.1, 0.2]], "float32"),
        "bias": [np.array([0.3, -0.2, 0.1], "float32"), np.float32(0.5)],
    }

    def gradient(step: float) -> list[Any]:
        moved = keras.tree.map_structure(lambda w, d: np.float64(w) + step * d, WEIGHTS, direction)
        hidden = np.tanh(ROWS @ moved["kernel"] + moved["bias"][0])
        slope = moved["bias"][1] * 2 * hidden * (1 - hidden**2) / hidden.size
        return [ROWS.T @ slope, slope.sum(0), np.mean(hidden**2)]

    product = jvp(grad(lambda w: perceptron(w, ROWS)), (WEIGHTS,), (direction,))[1]
    differences = [
        (ahead - behind) / 2e-5
        for ahead, behind in zip(gradient(1e-5), gradient(-1e-5), strict=True)
    ]
    assert close([product["kernel"], *product["bias"]], differences)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grad(cubic)(2), "grad: argument 0 holds int32; only floats"),
        (lambda: grad(cubic)({"a": "b"}), "grad: argument 0 holds str; only floats"),
        (lambda: grad(cubic, argnums=1)(2.0), "argnums is 1, but 1 positional arguments"),
        (lambda: grad(lambda x: x)(ROWS), r"float32 of shape \(3, 2\); return a scalar"),
        (lambda: grad(lambda x: ops.argmax(x))(ROWS[0]), "return a scalar of floats"),
        (lambda: grad(lambda _: "text")(1.0), "returns str; return a scalar"),
        (lambda: grad(cubic, has_aux=True)(2.0), r"with has_aux .* a pair, \(value, aux\)"),
        (lambda: jvp(cubic, 2.0, 1.0), "tuples with one entry per argument"),
        (lambda: jvp(cubic, (2.0,), (ROWS,)), r"tangents hold the shape \(3, 2\); give \(\)"),
        (lambda: jvp(cubic, (2.0,), (1.0, 2.0)), "tangents have the form"),
        (lambda: vjp(ops.sin, ROWS)[1](1.0), r"cotangents hold the shape \(\)"),
    ],
)
def test_wrong_use(call: Any, message: str) -> None:
    refused(message, call)
