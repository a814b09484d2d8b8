"""`keras.ops` under every transform: values and derivatives against NumPy, on each backend."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from keras import ops

from arrays import to_numpy
from kmodels import transforms
from tolerances import tolerance

X = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(2, 3)).astype("float32")
W = np.random.default_rng(2).normal(size=(3, 2)).astype("float32")


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Name: with keras.ops, and the same in NumPy; (2, 3) -> anything.
OPS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "identity": (lambda x: x, lambda x: x),
    "max": (lambda x: ops.max(x, axis=1), lambda x: x.max(1)),
    "sort": (lambda x: ops.sort(x, axis=1), lambda x: np.sort(x, 1)),
    "where": (lambda x: ops.where(x > 0, x * x, x), lambda x: np.where(x > 0, x * x, x)),
    "cumsum": (lambda x: ops.cumsum(x * x, axis=1), lambda x: np.cumsum(x * x, 1)),
    "softmax": (lambda x: ops.softmax(x, axis=-1), _softmax),
    "logsumexp": (lambda x: ops.logsumexp(x, axis=1), lambda x: np.log(np.exp(x).sum(1))),
    "matmul": (lambda x: ops.matmul(x, ops.convert_to_tensor(W)) ** 2, lambda x: (x @ W) ** 2),
    "reshape": (
        lambda x: ops.reshape(ops.transpose(ops.concatenate([x, x**2], 1)), (-1,)),
        lambda x: np.concatenate([x, x**2], 1).T.reshape(-1),
    ),
    "take": (lambda x: ops.take(x, np.array([2, 0]), axis=1) ** 2, lambda x: x[:, [2, 0]] ** 2),
}


def _weights(value: Any) -> np.ndarray:
    return np.random.default_rng(3).normal(size=tuple(value.shape)).astype("float32")


def _total(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def total(x: Any) -> Any:
        value = op(x)
        return ops.sum(value * ops.convert_to_tensor(_weights(value), value.dtype))

    return total


def _slope(plain: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """The gradient of the weighted sum, by differences in float64."""
    x, step = x.astype("float64"), 1e-5
    found = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        difference = plain(up) - plain(down)
        found[place] = (difference * _weights(difference)).sum() / (2 * step)
    return found


def _curvature(plain: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    x, step = x.astype("float64"), 1e-4
    found = np.zeros(x.shape + x.shape)
    for place in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        found[place] = (_slope(plain, up) - _slope(plain, down)) / (2 * step)
    return found


def _zeros(op: Callable[[Any], Any], x: Any) -> Any:
    return ops.zeros_like(op(x))


def _by_while(op: Callable[[Any], Any], x: Any) -> Any:
    return transforms.while_loop(
        lambda i, _: i < 3, lambda i, value: (i + 1, value + op(x)), (0, _zeros(op, x))
    )[1]


def _by_for(op: Callable[[Any], Any], x: Any) -> Any:
    return transforms.fori_loop(0, 3, lambda _, value: value + op(x), _zeros(op, x))


def _by_scan(op: Callable[[Any], Any], x: Any) -> Any:
    return transforms.scan(lambda last, part: (op(part), last), _zeros(op, x), ops.stack([x, x]))[0]


def _by_cond(op: Callable[[Any], Any], x: Any) -> Any:
    return transforms.cond(ops.sum(x) < 100.0, lambda: op(x), lambda: op(-x))


def _by_cond_else(op: Callable[[Any], Any], x: Any) -> Any:
    return transforms.cond(ops.sum(x) > 100.0, lambda: op(-x), lambda: op(x))


# Transform: how it is called, and what comes out by the value, the gradient and the Hessian.
TRANSFORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jit": (lambda op: transforms.jit(op)(X), lambda plain: plain(X)),
    "remat": (lambda op: transforms.remat(op)(X), lambda plain: plain(X)),
    "vmap": (
        lambda op: transforms.vmap(op)(np.stack([X, Y])),
        lambda plain: np.stack([plain(X), plain(Y)]),
    ),
    "grad": (lambda op: transforms.grad(_total(op))(X), lambda plain: _slope(plain, X)),
    "vjp": (
        lambda op: transforms.vjp(_total(op), X)[1](np.float32(1))[0],
        lambda plain: _slope(plain, X),
    ),
    "jvp": (
        lambda op: transforms.jvp(_total(op), (X,), (Y,))[1],
        lambda plain: (_slope(plain, X) * Y).sum(),
    ),
    "hessian": (lambda op: transforms.hessian(_total(op))(X), lambda plain: _curvature(plain, X)),
    "jit(grad)": (
        lambda op: transforms.jit(transforms.grad(_total(op)))(X),
        lambda plain: _slope(plain, X),
    ),
    "vmap(grad)": (
        lambda op: transforms.vmap(transforms.grad(_total(op)))(np.stack([X, Y])),
        lambda plain: np.stack([_slope(plain, X), _slope(plain, Y)]),
    ),
    "cond": (lambda op: _by_cond(op, ops.convert_to_tensor(X)), lambda plain: plain(X)),
    "jit(cond)": (lambda op: transforms.jit(lambda x: _by_cond(op, x))(X), lambda plain: plain(X)),
    "jit(cond), else": (
        lambda op: transforms.jit(lambda x: _by_cond_else(op, x))(X),
        lambda plain: plain(X),
    ),
    "jit(grad(cond))": (
        lambda op: transforms.jit(transforms.grad(_total(lambda x: _by_cond(op, x))))(X),
        lambda plain: _slope(plain, X),
    ),
    "jit(while_loop)": (
        lambda op: transforms.jit(lambda x: _by_while(op, x))(X),
        lambda plain: 3 * plain(X),
    ),
    "jit(fori_loop)": (
        lambda op: transforms.jit(lambda x: _by_for(op, x))(X),
        lambda plain: 3 * plain(X),
    ),
    "jit(scan)": (lambda op: transforms.jit(lambda x: _by_scan(op, x))(X), lambda plain: plain(X)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPS)
def test_table(name: str, transform: str) -> None:
    (op, plain), (run, expected) = OPS[name], TRANSFORMS[transform]
    found, right = to_numpy(ops.stop_gradient(run(op))), expected(plain)
    assert found.shape == np.shape(right)
    allowed = 10 * tolerance("transforms") if transform == "hessian" else tolerance("transforms")
    assert np.abs(found - right).max() <= allowed * max(1.0, np.abs(right).max())


@pytest.mark.parametrize("transform", ["jit(cond)", "jit(grad(cond))", "jit(scan)", "vmap(grad)"])
@pytest.mark.parametrize("name", ["identity", "max", "matmul"])
def test_in_bfloat16(name: str, transform: str) -> None:
    (op, plain), (run, expected) = OPS[name], TRANSFORMS[transform]
    found = run(lambda x: op(ops.cast(x, "bfloat16")))
    found, right = to_numpy(ops.cast(ops.stop_gradient(found), "float32")), expected(plain)
    allowed = tolerance("transforms", "bfloat16")
    assert np.abs(found - right).max() <= allowed * max(1.0, np.abs(right).max())
