"""`jit`, `trace` and `remat`; the path of ops inside transforms."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import kmodels
from kmodels.core import dispatch
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, Qwen3Backbone
from kmodels.transforms import cond, fori_loop, grad, hessian, jit, jvp, remat, trace, vmap
from refusals import refused
from tolerances import tolerance

ROWS = np.array([[1.0, -1.0], [0.5, 2.0], [3.0, 1.0]], "float32")
BACKEND = keras.backend.backend()


def to_numpy(x: Any) -> np.ndarray:
    return ops.convert_to_numpy(ops.stop_gradient(x))


def test_kmodels_has_the_transforms() -> None:
    assert kmodels.transforms.grad is grad
    assert "transforms" in dir(kmodels)


def test_python_runs_once_per_kind_of_argument() -> None:
    runs = []

    def fun(tree: Any, power: int = 1, *, up: bool = True) -> Any:
        """Says what it does."""
        runs.append(1)
        return {"y": tree["x"] ** power if up else -tree["x"], "none": None, "name": "fun"}

    traced = jit(fun, static_argnums=1, static_argnames="up")
    assert traced.__doc__ == fun.__doc__
    for _ in range(2):
        found = traced({"x": ROWS}, 2)
        assert (to_numpy(found["y"]) == ROWS**2).all()
        assert found["none"] is None and found["name"] == "fun"
    assert len(runs) == 1
    assert (to_numpy(traced({"x": ROWS}, 3)["y"]) == ROWS**3).all()
    assert (to_numpy(traced({"x": ROWS[0]}, 3)["y"]) == ROWS[0] ** 3).all()
    assert (to_numpy(traced({"x": ROWS}, up=False)["y"]) == -ROWS).all()
    assert len(runs) == 4
    refused("a static argument has no hash, among list", traced, {"x": ROWS}, [3])


def test_numbers_do_not_trace_anew() -> None:
    runs = []

    def fun(x: Any) -> Any:
        runs.append(1)
        return x * 2

    traced = jit(fun)
    assert [to_numpy(traced(x)) for x in (1.0, 2.0)] == [2, 4]
    assert len(runs) == 1


def test_derivatives_of_traced_functions() -> None:
    traced = jit(lambda x: 2 * x**3 + 8)
    assert to_numpy(traced(2.0)) == to_numpy(grad(traced)(2.0)) == 24
    assert (to_numpy(vmap(jit(grad(traced)))(ROWS[:, 0])) == 6 * ROWS[:, 0] ** 2).all()


def test_a_random_draw_is_not_frozen() -> None:
    """Seeds are arguments: torch, which draws by their values, says that it cannot trace that."""
    generator = keras.random.SeedGenerator(0)

    @jit
    def traced(state: Any) -> Any:
        with keras.StatelessScope([(generator.state, state)]):
            return keras.random.uniform((4,), seed=generator)

    seeds = [
        np.array([n, 0], keras.backend.standardize_dtype(generator.state.dtype)) for n in (1, 2)
    ]
    if BACKEND == "torch":
        refused("Python asked for the value of a traced tensor", traced, seeds[0])
    else:
        assert (to_numpy(traced(seeds[0])) != to_numpy(traced(seeds[1]))).all()


def test_what_is_kept_outside_is_named() -> None:
    variable = keras.Variable(np.float32(1))
    if BACKEND == "jax":
        jit(lambda x: variable.assign(x * 2))(2.0)
        with pytest.raises(InputError, match=r"kept outside of the function .* by stateless_call"):
            jit(lambda x: x * variable)(2.0)


def test_traces() -> None:
    text = str(trace(jit(vmap(grad(lambda x: ops.sum(x**3)))))(ROWS))
    held = {"jax": ("f32[3,2]", "mul"), "torch": ("aten.mul", "f32[3, 2]")}
    for word in held.get(BACKEND, ("Mul(", "float32(3, 2)")):
        assert word in text
    loop = str(trace(lambda n: fori_loop(0, n, lambda i, x: x * 2, 1.0))(np.array(3)))
    assert "while" in loop.lower()
    assert "cos" in str(trace(lambda x: cond(x > 0, lambda: ops.sin(x), lambda: ops.cos(x)))(1.0))


def test_remat() -> None:
    runs = []

    def layer(kernel: Any, x: Any) -> Any:
        runs.append(1)
        return ops.tanh(ops.matmul(x, kernel)), None

    def loss(kernel: Any, fun: Any) -> Any:
        return ops.sum(fun(kernel, ROWS)[0] ** 2)

    kernel = np.array([0.5, -0.25], "float32")
    expected = to_numpy(grad(lambda k: loss(k, layer))(kernel))
    runs.clear()
    found = grad(lambda k: loss(k, remat(layer)))(kernel)
    np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-6)
    # JAX computes again from its trace, and torch.func cannot.
    assert len(runs) == {"jax": 1, "torch": 1, "tensorflow": 3}[BACKEND]


def test_remat_of_what_is_no_argument() -> None:
    kernel = np.array([0.5, -0.25], "float32")

    def loss(kernel: Any) -> Any:
        return ops.sum(remat(lambda x: ops.matmul(x, kernel))(ROWS))

    if BACKEND == "tensorflow":
        with pytest.raises(InputError, match=r"^remat: the function uses tensors that are not its"):
            grad(loss)(kernel)
        with pytest.raises(InputError, match="TensorFlow has no forward mode through remat"):
            jvp(remat(ops.sin), (ROWS,), (ROWS,))
    else:
        assert (to_numpy(grad(loss)(kernel)) == ROWS.sum(0)).all()


def test_remat_of_torchs_autograd() -> None:
    """Outside of transforms it takes torch's own means."""
    if BACKEND != "torch":
        assert (to_numpy(remat(ops.sin)(ROWS)) == to_numpy(ops.sin(ROWS))).all()
        return
    runs = []

    def fun(x: Any) -> Any:
        runs.append(1)
        return ops.sum(ops.sin(x))

    x = ops.convert_to_tensor(ROWS).requires_grad_()
    remat(fun)(x).backward()
    assert len(runs) == 2
    np.testing.assert_allclose(x.grad, np.cos(ROWS), rtol=1e-6)


def decided(run: Any, name: str) -> dict[str, int]:
    dispatch.reset_decisions()
    run()
    return kmodels.decisions()[name]


def test_ops_take_the_path_that_can_be_transformed() -> None:
    x = ops.cast(ROWS, "bfloat16" if BACKEND == "jax" else "float32")

    def fun(x: Any) -> Any:
        found = kmodels.ops.gated_gelu(x, x * 2)
        return ops.sum(ops.cast(found, "float32") ** 2)

    assert decided(lambda: fun(x), "gated_gelu")["override"] == 1
    generic = {"torch": {"grad", "vmap", "jvp", "hessian"}, "jax": {"jvp", "hessian"}}
    generic["tensorflow"] = {"vmap", "hessian"}
    ways = {
        "grad": grad(fun),
        "vmap": vmap(fun),
        "jvp": lambda x: jvp(grad(fun), (x,), (x,)),
        "hessian": hessian(fun),
    }
    for name, run in ways.items():
        path = "generic" if name in generic.get(BACKEND, ()) else "override"
        counts = decided(partial(trace(run), x), "gated_gelu")
        assert {key for key, count in counts.items() if count} == {path}, name


def test_a_trace_holds_for_one_path() -> None:
    traced = jit(lambda x: kmodels.ops.gated_gelu(x, x))
    x = ops.cast(ROWS, "bfloat16" if BACKEND == "jax" else "float32")
    assert decided(lambda: traced(x), "gated_gelu") == {"override": 1, "generic": 0}
    with kmodels.generic_only("gated_gelu"):
        again = decided(lambda: traced(x), "gated_gelu")
    assert again["override"] == 0 and sum(again.values()) == 1
    # What was traced first is still there.
    assert sum(decided(lambda: traced(x), "gated_gelu").values()) == 0


@pytest.mark.parametrize(
    ("cls", "preset"), [(GemmaBackbone, "gemma_debug"), (Qwen3Backbone, "qwen3_debug")]
)
def test_a_decoder_whose_weights_are_trained(cls: Any, preset: str) -> None:
    model = cls.from_preset(preset)
    ids = np.arange(1, 13, dtype="int32").reshape(2, 6)
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    limit = {"rtol": 0, "atol": tolerance("logits_across")}
    traced, eager = jit(lambda x: model(x))(x), model(x)
    np.testing.assert_allclose(to_numpy(traced), to_numpy(eager), **limit)
    if BACKEND == "torch":  # whose autograd follows a traced function
        import torch

        weights = [variable.value for variable in model.trainable_variables]
        # Qwen 3's own head has no part in hidden states.
        found, wanted = (
            torch.autograd.grad(y.square().mean(), weights, materialize_grads=True)
            for y in (traced, eager)
        )
        assert any(gradient.any() for gradient in wanted)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(to_numpy(one), to_numpy(other), **limit)


def test_a_loss_over_a_vocabulary_is_traced() -> None:
    hidden, table = np.eye(4, 3, dtype="float32"), np.eye(5, 3, dtype="float32")
    labels, weights = np.array([0, 1, 4, 2]), np.array([1, 0, 0.5, 1], "float32")
    fun = partial(kmodels.ops.linear_cross_entropy, labels=labels, weights=weights)
    for found, wanted in zip(jit(fun)(hidden, table), fun(hidden, table), strict=True):
        np.testing.assert_allclose(to_numpy(found), to_numpy(wanted), rtol=1e-6)
