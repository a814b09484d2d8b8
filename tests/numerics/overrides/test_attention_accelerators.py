"""Attention on GPUs and TPUs as far as a CPU can prove it; collects nothing but on JAX.

Kernels that only CUDA has are replaced by a recorder and a body for CPUs; splash attention runs
interpreted; both are lowered for their platforms. Nothing here ran on such a device.
"""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import keras
import numpy as np
import pytest

from arrays_made import squares
from gradients import second_derivative, to_numpy, value_and_grad
from kmodels import generic_only, ops
from kmodels.distribution import distribute
from numpy_attention import attention_and_gradients
from tolerances import tolerance

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax
from jax import numpy as jnp

from kmodels.overrides import _attention_kernels_jax as kernels
from kmodels.overrides import attention_jax
from kmodels.overrides.attention_jax import Device, Facts, choose

HOPPER = Device("cuda", (9, 0), cudnn=True)
TPU = Device("tpu")
RNG = np.random.default_rng(3)

CALL = Facts(HOPPER, (2, 4096, 8, 128), (2, 4096, 4, 128), 128, "bfloat16", causal=True)
WIDE = {"query": (2, 4096, 8, 256), "key": (2, 4096, 4, 256), "value_width": 256}
SHORT = {"query": (2, 197, 8, 128), "key": (2, 197, 8, 128)}
# What differs from CALL, the body on Hopper and why it is no kernel, and the same on a TPU.
TABLE = {
    "causal": ({}, "cudnn", None, "splash", None),
    "window": ({"window": 512}, "cudnn", None, "splash", None),
    "all see all": ({"causal": False}, "cudnn", None, "splash", None),
    "window to both sides": (
        {"causal": False, "window": 9},
        *("loops", "windows in causal"),
        *("splash", None),
    ),
    "heads of 256": (WIDE, "cudnn", None, "splash", None),
    "heads of 80": (
        {"query": (2, 4096, 8, 80), "key": (2, 4096, 8, 80), "value_width": 80},
        *("cudnn", None),
        *("loops", "multiple of 64, not 80"),
    ),
    "float32": ({"dtype": "float32"}, "loops", "float16 and bfloat16", "splash", None),
    "float16": ({"dtype": "float16"}, "cudnn", None, "loops", "float32 and bfloat16"),
    "short float32": (SHORT | {"dtype": "float32"}, "generic", "float16 and", "splash", None),
    "short": (SHORT, "cudnn", None, "splash", None),
    "segments": ({"hidden": frozenset({"segments"})}, "loops", "no segments", "splash", None),
    "soft cap": ({"soft_cap": True}, "loops", "no soft cap", "splash", None),
    "mask": ({"hidden": frozenset({"mask"})}, *("loops", "no dense mask") * 2),
    "blocks": ({"hidden": frozenset({"blocks"})}, *("loops", "no image blocks") * 2),
    "dropout": ({"drops": True}, *("loops", "no dropout") * 2),
    "another seed": ({"drops": True, "generator": False}, *("generic", "SeedGenerator") * 2),
    "wide values": ({"value_width": 64}, *("loops", "as wide as keys") * 2),
    "one query": (
        {"query": (2, 1, 8, 128)},
        *("generic", "begins at the first key"),
        *("generic", "128 queries"),
    ),
    "any batch": ({"query": (None, 4096, 8, 128)}, *("loops", "not known") * 2),
    "any length": ({"query": (2, None, 8, 128)}, *("generic", "lengths are not") * 2),
    "a mesh": ({"rows": 2, "parts": 4}, "cudnn", None, "splash", None),
    "a mesh of 3": ({"rows": 3}, *("loops", "does not divide by the 3") * 2),
    "3 key heads on 2": (
        {"parts": 2, "query": (2, 4096, 12, 128), "key": (2, 4096, 3, 128)},
        *("generic", "3 key heads") * 2,
    ),
    "a mesh of the user's": ({"rows": 0, "parts": 0}, *("generic", "ModelParallel") * 2),
}


@pytest.mark.parametrize("label", TABLE)
def test_the_choice(label: str) -> None:
    changes, *expected = TABLE[label]
    for device, body, why in ((HOPPER, *expected[:2]), (TPU, *expected[2:])):
        choice = choose(replace(CALL, device=device, **changes))
        assert choice.body == body, choice
        assert (choice.reason is None) == (why is None), choice
        assert why is None or why in choice.reason


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (replace(HOPPER, cudnn=False), "no cuDNN"),
        (replace(HOPPER, capability=(7, 5)), "capability 8.0"),
        (replace(HOPPER, capability=(8, 0)), "up to 128 wide"),
        (replace(HOPPER, deterministic=True), "not deterministic"),
        (Device("rocm"), None),
        (Device("cpu"), None),
    ],
)
def test_the_device_matters(device: Device, why: str | None) -> None:
    choice = choose(replace(CALL, device=device, **WIDE))
    assert choice.body == "loops"
    assert choice.reason is None if why is None else why in (choice.reason or "")


def arrays(length: int, keys: int, width: int = 64) -> list[np.ndarray]:
    sizes = ((length, 4), (keys, 2), (keys, 2))
    return [RNG.normal(size=(2, *size, width)).astype("float32") for size in sizes]


@pytest.fixture
def recorded(monkeypatch) -> list:
    """Stands for a GPU; the arguments of the kernel, for which JAX's own XLA body serves."""
    found = []

    def cudnn(query, key, value, **given):
        found.append((query.shape, key.shape, str(query.dtype), given))
        window = None if given["window"] is None else (given["window"] - 1, 0)
        more = {"is_causal": given["causal"], "local_window_size": window}
        return jax.nn.dot_product_attention(query, key, value, scale=given["scale"], **more)

    as_on(monkeypatch, HOPPER, "cudnn", cudnn)
    return found


@pytest.fixture
def interpreted(monkeypatch) -> None:
    as_on(monkeypatch, TPU, "splash", partial(kernels.splash, interpret=True))


def as_on(monkeypatch, device: Device, name: str, kernel) -> None:
    monkeypatch.setattr(attention_jax, "device", lambda: device)
    monkeypatch.setattr(kernels, name, kernel)
    monkeypatch.setitem(kernels.PLATFORMS, name, "cpu")
    attention_jax._refused.cache_clear()
    attention_jax._bodies.cache_clear()


SEGMENTS = np.sort(RNG.integers(0, 4, (2, 200)), axis=1).astype("int32")
SPLASH = {
    "causal, segments": (200, 200, {"causal": True, "segment_ids": SEGMENTS}),
    "window, more keys": (140, 300, {"causal": True, "window": 30, "soft_cap": 0.8}),
    "all see all": (150, 200, {"scale": 0.3}),
    "window to both sides": (200, 200, {"window": 30, "segment_ids": SEGMENTS[:1]}),
}


@pytest.mark.each_time("causal, segments", "window, more keys")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("label", SPLASH)
def test_splash_attention(label: str) -> None:
    length, keys, keywords = SPLASH[label]
    given = arrays(length, keys)
    assert ops.attention.declines(*given, **keywords) is None
    found = value_and_grad(lambda *x: ops.attention(*x, **keywords), *given, compiled=True)
    check(found, given, keywords, "float32")


def check(found, given, keywords, dtype: str) -> None:
    """Compares with NumPy's float64, with the weights of `value_and_grad`."""
    value, gradients = found
    weight = np.random.default_rng(7).normal(size=value.shape)
    expected, wanted = attention_and_gradients(*given, weight, **keywords)
    allowed = tolerance("attention", dtype)
    assert np.abs(to_numpy(value) - expected).max() <= allowed * max(1, np.abs(expected).max())
    for ours, right in zip(gradients, wanted, strict=True):
        assert np.abs(ours - right).max() <= allowed * max(1, np.abs(right).max())


@pytest.mark.parametrize(
    "keywords", [{"causal": True}, {"causal": True, "window": 40, "scale": 0.2}, {}], ids=str
)
def test_what_cudnn_is_given(recorded: list, keywords: dict) -> None:
    given = [x.astype(jnp.bfloat16).astype("float32") for x in arrays(150, 150)]
    found = value_and_grad(lambda *x: ops.attention(*x, **keywords), *given, dtype="bfloat16")
    check(found, given, keywords, "bfloat16")
    expected = {"causal": False, "window": None, "scale": 0.125} | keywords
    assert recorded[-1] == ((2, 150, 4, 64), (2, 150, 2, 64), "bfloat16", expected)


@pytest.mark.parametrize(
    ("length", "keys", "keywords"),
    [
        (77, 77, {"causal": True}),
        (77, 77, {"causal": True, "window": 20}),
        (77, 77, {}),
        (50, 77, {}),
        (77, 50, {}),
    ],
)
def test_odd_lengths_are_padded_for_cudnn(monkeypatch, length: int, keys: int, keywords) -> None:
    """JAX's XLA body stands for cuDNN, with the arguments that cuDNN gets."""
    attend, shapes = jax.nn.dot_product_attention, []

    def plain(query, key, value, *, implementation, **given):
        shapes.append((implementation, query.shape[1], key.shape[1]))
        return attend(query, key, value, **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    as_on(monkeypatch, HOPPER, "cudnn", kernels.cudnn)
    given = [x.astype(jnp.bfloat16).astype("float32") for x in arrays(length, keys)]
    found = value_and_grad(lambda *x: ops.attention(*x, **keywords), *given, dtype="bfloat16")
    check(found, given, keywords, "bfloat16")
    assert {*shapes} == {("cudnn", length + length % 2, keys + keys % 2)}


def test_a_window_as_long_as_the_text_is_none(recorded: list) -> None:
    given = [x.astype(jnp.bfloat16) for x in arrays(40, 40)]
    ops.attention(*given, causal=True, window=40)
    assert recorded[-1][3]["window"] is None


@pytest.mark.usefixtures("recorded")
def test_second_derivatives_are_plain() -> None:
    given = [x[:, :20, :, :8].astype(jnp.bfloat16).astype("float32") for x in arrays(20, 20)]

    def run(op, *x):
        found = op(*[keras.ops.cast(one, "bfloat16") for one in x], causal=True)
        return keras.ops.cast(found, "float32")

    wanted = second_derivative(lambda *x: ops.attention.generic(*x, causal=True), given)
    for mode in ("reverse", "forward"):
        found = second_derivative(partial(run, ops.attention), given, mode)
        if mode == "forward":
            wanted = second_derivative(
                lambda *x: ops.attention.generic(*x, causal=True), given, mode
            )
        limit = tolerance("second_derivatives", "bfloat16")
        for ours, right in zip(found, wanted, strict=True):
            assert np.abs(ours - right).max() <= limit * np.abs(right).max()


def gradient(dtype: str = "bfloat16", **keywords):

    def run(query, key, value, weight):
        return jax.vjp(lambda *x: ops.attention(*x, **keywords), query, key, value)[1](weight)

    def shapes(batch: int, length: int, heads: int, groups: int, width: int) -> list:
        sizes = (heads, groups, groups, heads)
        return [jax.ShapeDtypeStruct((batch, length, n, width), dtype) for n in sizes]

    return run, shapes


@pytest.mark.parametrize(("window", "length"), [(None, 256), (64, 256), (None, 197)])
def test_lowered_for_cuda(monkeypatch, window: int | None, length: int) -> None:
    """JAX asks for cuDNN's version while it traces, and for no device."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(attention_jax, "device", lambda: HOPPER)
    attention_jax._refused.cache_clear()
    run, shapes = gradient(causal=True, window=window)
    traced = jax.jit(run).trace(*shapes(2, length, 4, 2, 64))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text
    assert "__cudnn$fmhaSoftmaxBackward(" in text
    assert f"sliding_window_length\\22: {window or 0}" in text
    assert "cudnn" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    # Each example alone, as `transforms.vmap` calls it.
    each = jax.jit(jax.vmap(lambda *x: run(*(one[None] for one in x))))
    text = each.trace(*shapes(2, length, 4, 2, 64)).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward(" in text
    attention_jax._refused.cache_clear()


LOWERED = {
    "causal, cuDNN": ("bfloat16", {}),
    "causal": ("float32", {}),
    "window": ("float32", {"window": 1024}),
    "segments, soft cap": ("bfloat16", {"segment_ids": True, "soft_cap": 30.0}),
}


@pytest.mark.parametrize("label", LOWERED)
@pytest.mark.parametrize("generic", [False, True], ids=["override", "generic"])
def test_what_is_lowered_for_cuda_has_no_array_of_all_pairs(
    monkeypatch, label: str, generic: bool
) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    length = 4096
    dtype, keywords = LOWERED[label]
    if "segment_ids" in keywords:
        keywords = keywords | {"segment_ids": np.arange(length, dtype="int32")[None] // 1000}
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(attention_jax, "device", lambda: HOPPER)
    attention_jax._refused.cache_clear()
    run, shapes = gradient(dtype, causal=True, **keywords)
    if generic:
        with generic_only("attention"):
            traced = jax.jit(run).trace(*shapes(1, length, 8, 4, 64))
    else:
        traced = jax.jit(run).trace(*shapes(1, length, 8, 4, 64))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("__cudnn$fmha" in text) == (label == "causal, cuDNN" and not generic)
    shapes_of = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    found = {tuple(map(int, x.split("x")[:-1])) for x in shapes_of}
    assert (1, length, 8, 64) in found
    assert not squares(found, length)
    attention_jax._refused.cache_clear()


def test_lowered_for_tpu(monkeypatch) -> None:
    monkeypatch.setattr(attention_jax, "device", lambda: TPU)
    attention_jax._refused.cache_clear()
    run, shapes = gradient(causal=True, window=200, soft_cap=30.0)
    traced = jax.jit(run).trace(*shapes(1, 600, 4, 2, 256))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call(") == 3  # forward, and two for the gradients
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_what_jax_declines_goes_by_loops(monkeypatch) -> None:
    monkeypatch.setattr(attention_jax, "device", lambda: HOPPER)
    attention_jax._refused.cache_clear()
    x = jnp.zeros((1, 1024, 1, 8), "bfloat16")
    choice = attention_jax.chosen(attention_jax.facts(ops.attention.bind(x, x, x)))
    assert choice == ("loops", "JAX declines the kernel: cuDNN is not detected")
    assert ops.attention(x, x, x).shape == x.shape
    attention_jax._refused.cache_clear()


@pytest.fixture
def mesh():
    distribute("data=2,model=4")
    yield keras.distribution.distribution().device_mesh.backend_mesh
    distribute(None)


@pytest.mark.each_time("4-True")
@pytest.mark.parametrize(("groups", "kernel"), [(4, True), (2, True), (2, False)])
def test_rows_and_heads_stay_on_their_devices(request, mesh, groups: int, kernel: bool) -> None:
    if kernel:
        request.getfixturevalue("recorded")
    dtype = "bfloat16" if kernel else "float32"
    run, shapes = gradient(dtype, causal=True, window=500)
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    places = (heads, *[heads if groups == 4 else whole] * 2, heads)
    given = [RNG.normal(size=x.shape).astype(dtype) for x in shapes(8, 600, 4, groups, 8)]
    step = jax.jit(run, in_shardings=places)
    compiled = step.lower(*given).compile()
    text = compiled.as_text() or ""
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    # Devices that share a key head add up its gradients, and send nothing else.
    assert ("all-reduce" in text) == (groups == 2)
    found = [np.asarray(x, "float32") for x in compiled(*map(jax.device_put, given, places))]
    distribute(None)
    keywords = {"causal": True, "window": 500}
    wide = [x.astype("float32") for x in given]
    _, expected = attention_and_gradients(*wide, **keywords)
    for ours, right in zip(found, expected, strict=True):
        limit = tolerance("attention", dtype) * max(1, np.abs(right).max())
        assert np.abs(ours - right).max() <= limit


# Whether the op's own body serves, heads, heads of keys, width, dtype, and the call.
HELD = {
    "causal": (False, 8, 4, 64, "float32", {"causal": True}),
    "window": (False, 8, 4, 256, "bfloat16", {"causal": True, "window": 1024}),
    "causal, own body": (True, 2, 1, 256, "bfloat16", {"causal": True}),
}


@pytest.mark.each_time("causal", "window")
@pytest.mark.parametrize("label", HELD)
def test_temporaries_grow_with_the_length(label: str) -> None:
    """Twice the length takes 2.2 times the memory at most, though it has four times the pairs."""
    generic, heads, groups, width, dtype, keywords = HELD[label]
    held = []
    for length in (4096, 8192):
        run, shapes = gradient(dtype, **keywords)
        with generic_only("attention") if generic else nullcontext():
            lowered = jax.jit(run).lower(*shapes(1, length, heads, groups, width))
        held.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert held[1] <= 2.2 * held[0], held


@pytest.mark.parametrize("device", [Device("cpu"), Device("rocm")], ids=str)
def test_blocks_that_nobody_sees_are_left_out(monkeypatch, device: Device) -> None:
    """Forward and backward; a window of 1,024 has 0.25 of the pairs of 8,192 causal tokens."""
    monkeypatch.setattr(attention_jax, "device", lambda: device)

    def work(window: int | None) -> int:
        run, shapes = gradient(causal=True, window=window)
        return multiplied(jax.make_jaxpr(run)(*shapes(1, 8192, 8, 4, 64)).jaxpr)

    assert work(1024) <= 0.3 * work(None)


def multiplied(jaxpr) -> int:
    """Counts what the matrix products of a program multiply, in loops as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            inner = [equation.invars[0].aval.shape[axis] for axis in axes]
            total += math.prod(equation.outvars[0].aval.shape) * math.prod(inner)
        inside = [getattr(x, "jaxpr", x) for x in equation.params.values()]
        found = sum(multiplied(x) for x in inside if hasattr(x, "eqns"))
        total += found * equation.params.get("length", 1)
    return total
