"""`kmodels.override`: registration, order, switches, and one line for each mistake."""

import functools

import keras
import numpy as np
import pytest

import kmodels
from kmodels import ops
from kmodels.models import ViTImageClassifier
from kmodels.overrides import user
from refusals import refused

BACKEND = keras.backend.backend()
OTHER = next(name for name in ("jax", "torch") if name != BACKEND)


@pytest.fixture(autouse=True)
def no_bodies_left():
    kmodels.reset_decisions()
    yield
    for op in (ops.attention, ops.gelu, ops.mlp, ops.dense):
        op.set_user(None)
    kmodels.reset_decisions()


def register(name, function, backend=BACKEND, **options):
    return kmodels.override(name, backend=backend, **options)(function)


def ones(x):
    return keras.ops.ones_like(x)


def value(x) -> float:
    return float(np.ravel(keras.ops.convert_to_numpy(x))[0])


@pytest.mark.each_backend
def test_it_comes_first_and_leaves_what_it_has_no_parameter_for() -> None:
    x = keras.ops.zeros((2, 3))
    body = register("gelu", ones)
    assert value(ops.gelu(x)) == 1 and value(ops.gelu(x, approximate=False)) == 1
    assert value(ops.gelu(x, approximate=True)) == 0
    counts = kmodels.decisions()["gelu"]
    assert counts.pop("ones") == 2 and counts.pop("ones has no approximate") == 1
    assert sum(counts.values()) == 1  # the path that the declined call took
    assert repr(body) == "override ones of gelu" and value(body(x)) == 1
    with kmodels.generic_only("gelu"):
        assert value(ops.gelu(x)) == 0
    assert ops.gelu(keras.KerasTensor((None, 4))).shape == (None, 4)
    body.remove()
    assert value(ops.gelu(x)) == 0


def test_supports_gets_the_call_and_its_reason_is_counted() -> None:
    rows = lambda call: "one row" if call.x.shape[0] == 1 else None  # noqa: E731
    register("gelu", ones, supports=rows)
    assert value(ops.gelu(keras.ops.zeros((1, 3)))) == 0
    assert value(ops.gelu(keras.ops.zeros((2, 3)))) == 1
    assert kmodels.decisions()["gelu"]["ones: one row"] == 1


def test_registering_again_replaces_and_removing_the_former_changes_nothing() -> None:
    x = keras.ops.zeros((2, 3))
    former = register("gelu", ones)
    register("gelu", lambda x: 2 * keras.ops.ones_like(x))
    former.remove()
    assert value(ops.gelu(x)) == 2


def test_on_another_backend_nothing_is_registered(caplog) -> None:
    with caplog.at_level("INFO", "kmodels"):
        body = register("gelu", ones, OTHER)
    assert f"override ones of gelu is for {OTHER}; {BACKEND} runs" in caplog.text
    assert ops.gelu.user is None
    body.remove()


def test_wrong_registrations_are_one_line() -> None:
    refused(
        "override got unknown op 'atention'; did you mean attention?",
        *(kmodels.override, "atention"),
        backend=BACKEND,
    )
    refused("unknown op 'x'; ops are attention, dense", kmodels.override, "x", backend=BACKEND)
    refused("backend is 'tpu'; choose one of jax, torch", kmodels.override, "gelu", backend="tpu")
    for wrong in (lambda y: y, lambda x, rate: x, lambda *x: x, lambda x, /: x):
        refused("takes .*; it must take x by name, and may take approx", register, "gelu", wrong)
    refused("override max of gelu has no signature; call it in", register, "gelu", max)
    register("gelu", functools.partial(lambda x, approximate: x, approximate=False))
    refused(
        "supports must take one parameter, the OpCall", register, "gelu", ones, supports=lambda: 1
    )


def test_what_the_function_does_wrong_is_one_line() -> None:
    x = keras.ops.ones((2, 3))

    def fails(x):
        raise KeyError("no\nkernel")

    register("gelu", fails)
    refused("override fails of gelu failed: KeyError: .*kernel.*; decline such", ops.gelu, x)
    register("gelu", lambda x: x[:1])
    refused("returned float32 \\(1, 3\\); the op returns float32 \\(2, 3\\)", ops.gelu, x)
    register("gelu", lambda x: keras.ops.cast(x, "float16"))
    refused("returned float16 \\(2, 3\\); the op returns float32 \\(2, 3\\)", ops.gelu, x)
    register("gelu", lambda x: 1)
    refused("returned int \\(\\); the op returns float32 \\(2, 3\\)", ops.gelu, x)

    def out_of_memory(x):
        raise MemoryError

    register("gelu", out_of_memory)
    with pytest.raises(MemoryError):
        ops.gelu(x)


def test_a_dropped_gradient_is_refused_on_torch() -> None:
    import torch

    x = torch.ones(2, 3, requires_grad=True)
    register("gelu", lambda x: x.detach() * 1.0)
    refused("returned a tensor without gradient; use differentiable", ops.gelu, x)
    with torch.no_grad():
        assert value(ops.gelu(x)) == 1


@pytest.mark.each_backend
def test_the_check_of_shapes_neither_counts_nor_draws() -> None:
    x, kernel = keras.ops.ones((2, 3)), keras.ops.ones((3, 3))
    body = lambda x, up, up_bias, down, down_bias: x + 0.0  # noqa: E731
    register("mlp", body)
    ops.mlp(x, kernel, None, kernel, None)
    assert all(not any(kmodels.decisions()[name].values()) for name in ("dense", "gelu"))
    seed, q = keras.random.SeedGenerator(1), keras.ops.ones((1, 4, 2, 4))
    register("attention", lambda query, key, value, dropout, seed: query + 0.0)
    before = keras.ops.convert_to_numpy(seed.state)
    ops.attention(q, q, q, dropout=0.5, seed=seed)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(seed.state), before)


@pytest.mark.each_backend
def test_steps_of_a_model_are_traced_again() -> None:
    keras.utils.set_random_seed(0)
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    images = np.random.default_rng(0).random((2, 16, 16, 3), "float32")
    before = model.predict(images, verbose=0)
    body = register("attention", lambda query, key, value: 0.0 * query)
    during = model.predict(images, verbose=0)
    body.remove()
    after = model.predict(images, verbose=0)
    assert np.abs(during - before).max() > 1e-6
    np.testing.assert_array_equal(after, before)


def test_torch_compile_takes_the_body_without_a_break() -> None:
    import torch

    step = torch.compile(lambda x: ops.gelu(x), fullgraph=True, backend="aot_eager")
    x = torch.zeros(2, 3)
    assert value(step(x)) == 0
    register("gelu", ones)
    assert value(step(x)) == 1


def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path) -> None:
    refused(
        "--override .*none.py does not exist; give a Python file", user.load, tmp_path / "none.py"
    )
    file = tmp_path / "kernel.py"
    file.write_text("import not_there\n")
    refused("kernel.py failed: ModuleNotFoundError: No module", user.load, file)
    file.write_text(
        f"import kmodels\n@kmodels.override('gelu', backend='{BACKEND}')\ndef own(x):\n  return x\n"
    )
    user.load(file)
    assert ops.gelu.user is not None and ops.gelu.user.name == "own"
