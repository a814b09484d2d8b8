"""How an op chooses its body: registration, switches, counting, abstract tensors, torch.compile."""

import ast
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

import kmodels
from kmodels import ops
from kmodels.core import dispatch
from kmodels.core.dispatch import OpCall
from kmodels.core.runtime import RuntimeBackend
from refusals import refused
from source_tree import decorated, trees

BACKEND = keras.backend.backend()


def _named(function, name: str):
    function.__name__ = name
    return function


@pytest.fixture
def doubled():
    """An op `doubled` that multiplies by 2, and by 3 where its override runs."""

    def doubled(x, *, times=2.0):
        return x * times

    op = dispatch.op(doubled)
    supports = lambda call: "x is a vector" if len(call.x.shape) == 1 else None  # noqa: E731
    dispatch.override(op, supports)(
        _named(lambda x, *, times=2.0: x * (times + 1), f"doubled_{BACKEND}")
    )
    dispatch.reset_decisions()
    yield op
    del dispatch._OPS["doubled"]
    dispatch.reset_decisions()


def value(x) -> float:
    return float(np.ravel(keras.ops.convert_to_numpy(x))[0])


def test_decisions_count_each_path(doubled) -> None:
    assert dispatch.summary()["doubled"] == "not called"
    assert value(doubled(keras.ops.ones((2, 2)))) == 3
    assert value(doubled(keras.ops.ones((2,)))) == 2
    with kmodels.generic_only("doubled"):
        assert value(doubled(keras.ops.ones((2, 2)))) == 2
    assert kmodels.decisions()["doubled"] == {"override": 1, "generic": 1, "x is a vector": 1}
    doubled(keras.ops.ones((2, 2)))
    assert dispatch.summary()["doubled"] == "override"
    dispatch.reset_decisions()
    # A symbolic tensor takes the generic path, uncounted.
    assert doubled(keras.KerasTensor((None, 4)), times=3.0).shape == (None, 4)
    assert kmodels.decisions()["doubled"] == {"override": 0, "generic": 0}


def test_generic_only_nests_names_ops_and_ends_with_an_exception(doubled) -> None:
    x = keras.ops.ones((2, 2))
    with pytest.raises(RuntimeError), kmodels.generic_only(doubled):
        with kmodels.generic_only("dense"):
            assert value(doubled(x)) == 2
        raise RuntimeError
    with kmodels.generic_only("dense"):
        assert value(doubled(x)) == 3
    with kmodels.generic_only():
        assert value(doubled(x)) == 2
        assert "generic_only" in doubled.declines(x)
    assert doubled.declines(x) is None
    unknown = kmodels.generic_only("nonsense")
    refused("unknown ops nonsense; known: all, attention", unknown.__enter__)


def test_decline_all_holds_in_every_thread_until_it_is_undone(doubled) -> None:
    x = keras.ops.ones((2, 2))
    dispatch.decline_all("layers are split")
    try:
        with ThreadPoolExecutor() as threads:
            assert threads.submit(doubled.declines, x).result() == "layers are split"
    finally:
        dispatch.decline_all(None)
    assert doubled.declines(x) is None


@pytest.mark.each_backend
def test_a_compiled_step_keeps_the_path_it_was_traced_with(doubled) -> None:
    if BACKEND == "torch":  # eager: the block takes effect at once
        with kmodels.generic_only():
            assert value(doubled(keras.ops.ones((2, 2)))) == 2
        return
    if BACKEND == "jax":
        import jax

        step = jax.jit(lambda x: doubled(x))
    else:
        import tensorflow as tf

        step = tf.function(lambda x: doubled(x))
    assert value(step(keras.ops.ones((2, 2)))) == 3
    with kmodels.generic_only():
        assert value(step(keras.ops.ones((2, 2)))) == 3


def test_registration_is_checked(doubled) -> None:
    with pytest.raises(TypeError, match="an op named 'doubled' already"):
        dispatch.op(_named(lambda x: x, "doubled"))
    with pytest.raises(TypeError, match="has an override on"):
        dispatch.override(doubled)(_named(lambda x, *, times=2.0: x, f"doubled_{BACKEND}"))
    bare = dispatch.Op(_named(lambda x, *, times=2.0: x, "bare"))
    with pytest.raises(TypeError, match="is named <op>_<backend>"):
        dispatch.override(bare)(_named(lambda x, *, times=2.0: x, "other"))
    for wrong in (lambda x, *, time=2.0: x, lambda x, times=2.0: x, lambda x, *, times=1.0: x):
        with pytest.raises(TypeError, match="must take the parameters of bare"):
            dispatch.override(bare)(_named(wrong, f"bare_{BACKEND}"))
    for wrong in (lambda x: None, lambda x, *, times=2.0: None, lambda call, times: None):
        with pytest.raises(TypeError, match="must take one parameter, call: an OpCall with"):
            dispatch.override(bare, wrong)(_named(lambda x, *, times=2.0: x, f"bare_{BACKEND}"))
    assert bare.override is None


def test_supports_gets_the_arguments_by_name_with_the_defaults(doubled) -> None:
    x, held = keras.ops.ones((2,)), []
    doubled.supports = held.append
    doubled(x)
    doubled(x=x, times=4.0)
    assert doubled.declines(x, times=5.0) is None
    assert [call.x for call in held] == [x] * 3
    assert [call.times for call in held] == [2.0, 4.0, 5.0]
    assert all(isinstance(call, OpCall) for call in held)
    with pytest.raises(AttributeError, match="rate"):
        _ = held[0].rate
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        doubled(x, 3.0)
    # A call without supports builds nothing.
    doubled.supports, doubled.bind = None, lambda *_, **__: pytest.fail("an OpCall was made")
    assert value(doubled(x)) == 3
    with kmodels.generic_only():
        doubled.supports = pytest.fail
        assert value(doubled(x)) == 2


def test_supports_asks_for_parameters_of_its_op() -> None:
    """On all backends: by the syntax trees, for an attribute that is none would raise in a call."""
    checked, overrides = 0, decorated("overrides", "override")
    for file in sorted(set(overrides.values())):
        functions = {n.name: n for n in trees()[file].body if isinstance(n, ast.FunctionDef)}
        parameters, supports = {}, {}
        for name in functions.keys() & overrides.keys():
            op = dispatch.ops()[name.rpartition("_")[0]]
            parameters[name] = set(inspect.signature(op.generic).parameters)
            (mark,) = functions[name].decorator_list
            supports |= {ast.unparse(argument): name for argument in mark.args[1:]}
        for name, function in functions.items():
            # A function that no decorator names may be asked by any override of the file.
            owners = [supports[name]] if name in supports else parameters
            allowed = set.union(*(parameters[owner] for owner in owners))
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "call":
                    assert node.attr in allowed, (file, node.attr)
                    checked += 1
    assert checked > 30


def test_environment(doubled, monkeypatch) -> None:
    x = keras.ops.ones((2, 2))
    try:
        for names, expected in (("dense, doubled", 2), ("dense", 3), ("all", 2), ("", 3)):
            monkeypatch.setenv(dispatch.ENVIRONMENT, names)
            dispatch.load_environment()
            assert value(doubled(x)) == expected
        monkeypatch.setenv(dispatch.ENVIRONMENT, "dense,typo")
        dispatch.load_environment()
        refused("KMODELS_GENERIC_OPS names unknown ops typo; known", doubled, x)
        refused("unknown ops typo", dispatch.load_environment, strict=True)
    finally:
        monkeypatch.delenv(dispatch.ENVIRONMENT)
        dispatch.load_environment()


def test_backend_module(monkeypatch) -> None:
    found: Any = dispatch.backend_module("kmodels.core.runtime", RuntimeBackend)
    assert found.__name__ == f"kmodels.core.runtime_{BACKEND}"
    assert dispatch.backend_module("kmodels.core.errors", RuntimeBackend, optional=True) is None
    monkeypatch.setattr(dispatch, "backend", lambda: "numpy")
    found = dispatch.backend_module("kmodels.core.runtime", RuntimeBackend)
    message = "^Backend 'numpy' is not supported; use jax, torch or"
    refused(message, lambda: found.matmul_precision())


# torch's own tracer makes an instance of an autograd.Function, and warns of it.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_ops_do_not_break_the_graph_of_torch_compile() -> None:
    import torch

    seed = keras.random.SeedGenerator(3)

    def step(x, kernel, scale):
        y = ops.layer_norm(ops.dense(x, kernel), scale)
        y = ops.dropout(y, 0.5, seed).reshape(2, 5, 2, 4)
        return ops.gelu(ops.attention(y, y, y, causal=True, window=3)).sum()

    x, kernel, scale = torch.ones(2, 5, 8), torch.eye(8, requires_grad=True), torch.ones(8)
    x = x + torch.arange(8.0)
    expected = step(x, kernel, scale)
    seed.state.assign(keras.ops.convert_to_tensor([3, 0], dtype=seed.state.dtype))
    dispatch.reset_decisions()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(x, kernel, scale)
    assert abs(found.item() - expected.item()) < 1e-4
    found.backward()
    assert kernel.grad.abs().sum() > 0
    counted = {name: sum(row.values()) for name, row in kmodels.decisions().items()}
    for _ in range(3):  # neither recompiles nor counts again
        compiled(x, kernel, scale)
    assert {name: sum(row.values()) for name, row in kmodels.decisions().items()} == counted
    assert kmodels.decisions()["dropout"]["override"] > 0
