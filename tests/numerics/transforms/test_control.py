"""Branches and loops: values, derivatives where the backend has them, and errors where not."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from kmodels.core.errors import InputError
from kmodels.transforms import cond, fori_loop, grad, jit, jvp, scan, vmap, while_loop
from refusals import refused

JAX, TORCH = (keras.backend.backend() == name for name in ("jax", "torch"))

ROW = np.array([2.0, 3.0, 4.0], "float32")


def to_numpy(tree: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: ops.convert_to_numpy(ops.stop_gradient(x)).tolist() if ops.is_tensor(x) else x,
        tree,
    )


def factorial(n: Any) -> Any:
    return while_loop(lambda i, _: i <= n, lambda i, product: (i + 1, product * i), (1, 1))[1]


def branch(x: Any) -> Any:
    return cond(x > 1.5, lambda: x**3, lambda: x * x)


def cube_by_while(x: Any) -> Any:
    return while_loop(lambda i, _: i < 3, lambda i, power: (i + 1, power * x), (0, 1.0))[1]


def cube_by_for(x: Any) -> Any:
    return fori_loop(0, 3, lambda _, power: power * x, 1.0)


def products(x: Any, unroll: bool | int = 1) -> Any:
    """Sum of 1, x0, x0 x1, ..."""
    return ops.sum(scan(lambda c, y: (c * y, c), 1.0, x, unroll=unroll)[1])


def test_factorial() -> None:
    assert to_numpy(factorial(3)) == 6
    traced = jit(factorial)
    assert [to_numpy(traced(n)) for n in (3, 5)] == [6, 120]


def test_cond() -> None:
    for x, value, slope in ((1.0, 1.0, 2.0), (2.0, 8.0, 12.0)):
        assert to_numpy(branch(x)) == to_numpy(jit(branch)(x)) == value
        assert to_numpy(grad(branch)(x)) == to_numpy(jit(grad(branch))(x)) == slope
    mapped = vmap(grad(branch))
    assert to_numpy(mapped(ROW - 1)) == to_numpy(jit(mapped)(ROW - 1)) == [2, 12, 27]
    assert to_numpy(cond(True, lambda: {"a": 1.0}, lambda: {"a": 2.0})) == {"a": 1.0}


def test_a_branch_hands_back_what_it_got() -> None:
    """`torch.cond` takes no such branch, no number, and no tensor twice."""

    def fun(x: Any) -> Any:
        return cond(ops.sum(x) > 1, lambda: {"a": x, "b": 1.0}, lambda: {"a": -x, "b": x[0]})

    found = jit(fun)(ROW)
    assert to_numpy(found) == {"a": [2, 3, 4], "b": 1}
    assert to_numpy(jit(fun)(-ROW)) == {"a": [2, 3, 4], "b": -2}


def test_an_error_in_a_branch_is_its_own() -> None:
    def fun(x: Any) -> Any:
        return cond(ops.sum(x) > 1, lambda: ops.max(x), lambda: _refuse())

    def _refuse() -> Any:
        raise InputError("not this one")

    with pytest.raises(InputError, match="not this one"):
        jit(fun)(ROW)


def test_while_loop_ends() -> None:
    def fun(x: Any) -> Any:
        return while_loop(lambda x: x < 100, lambda x: x * 2, x, maximum_iterations=3)

    assert to_numpy(fun(np.array(1))) == to_numpy(jit(fun)(1)) == 8
    assert to_numpy(fun(np.array(50))) == to_numpy(jit(fun)(50)) == 100


def test_derivatives_of_loops() -> None:
    assert to_numpy(grad(cube_by_for)(2.0)) == to_numpy(jit(grad(cube_by_for))(2.0)) == 12
    assert to_numpy(grad(grad(cube_by_for))(2.0)) == 12
    for fun in (cube_by_for, cube_by_while):
        assert to_numpy(jvp(fun, (2.0,), (1.0,))) == (8, 12)
    if JAX:
        for fun in (grad(cube_by_while), jit(grad(cube_by_while))):
            refused("JAX has no reverse mode for a while_loop", fun, 2.0)
    else:
        assert to_numpy(grad(cube_by_while)(2.0)) == to_numpy(jit(grad(cube_by_while))(2.0)) == 12


def test_bounds_that_are_tensors() -> None:
    def fun(lower: Any, upper: Any) -> Any:
        def body(i: Any, tree: Any) -> Any:
            return {"sum": tree["sum"] + ops.cast(i, "float32"), "pair": tree["pair"][::-1]}

        return fori_loop(lower, upper, body, {"sum": 1.0, "pair": [0.0, 1.0]})

    for found in (fun(np.array(2), np.array(5)), jit(fun)(2, 5)):
        assert to_numpy(found) == {"sum": 10, "pair": [1, 0]}


def test_scan_of_trees() -> None:
    def step(carry: Any, x: Any) -> Any:
        product, count = carry
        return (product * x["x"], count + 1.0), {"before": product, "twice": x["x"] * 2}

    for unroll in (1, True):
        last, ys = scan(step, (1.0, 0.0), {"x": ROW}, unroll=unroll)
        assert to_numpy(last) == (24, 3)
        assert to_numpy(ys) == {"before": [1, 2, 6], "twice": [4, 6, 8]}
    last, ys = scan(lambda c, x: (c + x, c), 0.0, ROW, reverse=True)
    assert to_numpy((last, ys)) == (9, [7, 4, 0])
    assert to_numpy(scan(lambda c, _: (c * 2, None), 1.0, length=3)) == (8, None)


def test_derivatives_of_scan() -> None:
    slope = [1 + 3, 2, 0]
    assert to_numpy(grad(products)(ROW)) == to_numpy(jit(grad(products))(ROW)) == slope
    assert to_numpy(jvp(products, (ROW,), (ROW,))) == (9, 14)
    both = np.stack([ROW, ROW])
    assert to_numpy(vmap(products)(both)) == [9, 9]
    assert to_numpy(vmap(grad(lambda x: products(x, True)))(both)) == [slope, slope]


def test_loops_of_mapped_length() -> None:
    def count(n: Any) -> Any:
        return while_loop(lambda i: i < n, lambda i: i + 1, np.array(0))

    lengths = np.array([1, 2, 3])
    if TORCH:
        with pytest.raises(InputError, match=r"^while_loop: torch cannot map a loop whose length"):
            vmap(count)(lengths)
    else:
        assert to_numpy(vmap(count)(lengths)) == [1, 2, 3]


def by_if(n: Any) -> Any:
    return ops.ones((), "int32") if n <= 1 else n * by_if(n - 1)


def by_cond(n: Any) -> Any:
    return cond(n <= 1, lambda: ops.ones_like(n), lambda: n * by_cond(n - 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jit(by_if)(3), "jit: Python asked for the value .* recursion that depends on it"),
        (lambda: jit(by_cond)(3), "calls itself without end while it is traced"),
        (lambda: jit(int)(3), "Python asked for the value"),
        (lambda: jit(np.sin)(3.0), "Python asked for the value"),
        (lambda: scan(products, 1.0), "neither xs nor length is given"),
        (lambda: scan(products, 1.0, ROW, length=2), r"have the lengths \[2, 3\]"),
        (lambda: scan(products, 1.0, length=0), "the length is 0; give at least 1"),
    ],
)
def test_what_cannot_be_traced(call: Any, message: str) -> None:
    refused(message, call)
