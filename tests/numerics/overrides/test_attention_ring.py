"""Attention over tokens that lie in parts on several devices; collects nothing but on JAX."""

import math
import re

import keras
import numpy as np
import pytest

from gradients import second_derivative, to_numpy
from kmodels import ops
from kmodels.distribution import distribute
from numpy_attention import attention_and_gradients
from tolerances import tolerance

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax
from jax.sharding import NamedSharding, PartitionSpec

from kmodels.overrides._attention_ring_jax import Hop, Plan, hop_blocks, near
from kmodels.overrides.attention_jax import Device, Facts, choose

RNG = np.random.default_rng(5)
BATCH, LENGTH = 2, 96
IDS = np.sort(RNG.integers(0, 4, (BATCH, LENGTH)), 1).astype("int32")
PAIRS = RNG.random((BATCH, 1, LENGTH, LENGTH)) < 0.5
PAIRS[:, :, 3] = False  # a query that sees nothing
IMAGES = np.where(RNG.random((1, LENGTH)) < 0.7, np.arange(LENGTH) // 20, -1).astype("int32")


@pytest.fixture(autouse=True)
def _no_mesh_left():
    yield
    distribute(None)


def arrays(length=LENGTH, width=8):
    sizes = (4, 2, 2, 4)
    return [RNG.normal(size=(BATCH, length, n, width)).astype("float32") for n in sizes]


def run(mesh, given, weight, options):
    """Output and gradients on a mesh, and the compiled program."""
    options = dict(options)
    drops = "dropout" in options
    distribute(mesh)

    def body(*given):
        more = {"seed": keras.random.SeedGenerator(7)} if drops else {}
        return ops.attention(*given, **options, **more)

    def both(weight, *given):
        output, pull = jax.vjp(body, *given)
        return output, *pull(weight)

    along = keras.distribution.distribution()
    if along is not None:
        mesh, rows = along.device_mesh.backend_mesh, ("data", "fsdp")
        given = jax.device_put(given, NamedSharding(mesh, PartitionSpec(rows, "sequence")))
        weight = jax.device_put(weight, NamedSharding(mesh, PartitionSpec(rows, "sequence")))
    program = jax.jit(both).lower(weight, *given).compile()
    found = [to_numpy(x) for x in program(weight, *given)]
    distribute(None)
    return found, program


# By label: arguments of attention that NumPy's reference has too.
CASES = {
    "causal": {"causal": True},
    "segments and cap": {"causal": True, "segment_ids": IDS, "soft_cap": 3.0},
    "window of one neighbour": {"causal": True, "window": 20},
    "window of two": {"causal": True, "window": 40, "segment_ids": IDS},
    "all see all": {},
    "window to both sides": {"window": 10},
    "wide window to both sides": {"window": 80},
}


@pytest.mark.parametrize("label", CASES)
def test_it_is_attention(label):
    *given, weight = arrays()
    output, gradients = attention_and_gradients(*given, weight, **CASES[label])
    mesh = "data=2,sequence=4" if "window" in label else "sequence=8"
    found, program = run(mesh, given, weight, CASES[label])
    assert " collective-permute" in (program.as_text() or "")
    for got, wanted in zip(found, (output, *gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("losses_of_ranks"))


# What NumPy's reference lacks: beside one device.
MORE = {
    "mask of pairs": {"mask": PAIRS},
    "mask of keys": {"mask": PAIRS[:, :, 5:6]},
    "images": {"causal": True, "block_ids": IMAGES, "window": 30, "segment_ids": IDS},
    "dropout": {"causal": True, "dropout": 0.3},
    "dropout in a window": {"causal": True, "window": 20, "dropout": 0.3, "mask": PAIRS},
}


@pytest.mark.parametrize("label", MORE)
def test_it_is_that_of_one_device(label):
    *given, weight = arrays()
    wanted, _ = run(None, given, weight, MORE[label])
    meshes = ["data=2,sequence=4"] + ([] if "dropout" in label else ["sequence=2,model=4"])
    for mesh in meshes:
        found, program = run(mesh, given, weight, MORE[label])
        assert " collective-permute" in (program.as_text() or "")
        for got, one in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, one, rtol=0, atol=tolerance("losses_of_ranks"))


def permuted(program):
    """Elements of each float array that a device passes on, by its place in the program."""
    text = program.as_text() or ""
    found = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    return [math.prod(map(int, shape.split(","))) for shape in found]


def test_no_device_holds_a_row():
    """Temporaries fall with the devices, and a window asks for no more than it sees."""
    length, width = 1024, 8
    *given, weight = arrays(length, width)
    held = {}
    for parts in (2, 4, 8):
        _, program = run(f"sequence={parts}", given, weight, {"causal": True})
        text = program.as_text() or ""
        assert not re.findall(r" all-(?:gather|to-all)\(", text)
        share = BATCH * 2 * (length // parts) * width
        assert max(permuted(program)) == share
        shapes = [shape.split(",") for shape in re.findall(r"f32\[([\d,]+)\]", text)]
        # On two devices, two queries for each key of half a row are as many as a row has tokens.
        assert parts == 2 or not [shape for shape in shapes if str(length) in shape]
        held[parts] = program.memory_analysis().temp_size_in_bytes
    assert held[8] < 0.6 * held[4] and held[4] < 0.6 * held[2], held
    _, program = run("sequence=4", given, weight, {"causal": True, "window": 33})
    # Keys, values and the gradients of both; XLA may keep keys and values for the way back.
    sent = permuted(program)
    assert {*sent} == {BATCH * 2 * 32 * width} and 4 <= len(sent) <= 6, sent


def test_second_derivatives():
    given = arrays(16)[:3]

    def body(*given):
        return ops.attention(*given, causal=True, soft_cap=2.0)

    alone = second_derivative(body, given)
    distribute("sequence=4")
    for got, wanted in zip(second_derivative(body, given), alone, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("logits"))


def test_hops():
    """A window asks as many devices as it reaches, and one to both sides at most all."""
    options = (1, 0, True, 33, 1.0, None, 0.0, (1, 1, 512, 512))
    plan = Plan(*options, axis="sequence", parts=8, rows=(), size=16)
    assert near(plan, 64, False) == [Hop(0, 0, 64), Hop(1, 32, 64)]
    assert near(plan, 16, False) == [Hop(0, 0, 16), Hop(1, 0, 16), Hop(2, 0, 16)]
    assert near(plan, 64, True) is None
    blocks = hop_blocks(plan, Hop(1, 32, 64), 64)
    assert [(x.start, x.low) for x in blocks] == [(0, 0), (16, 16)]


def test_what_the_ring_does_not_serve():
    call = Facts(Device("cuda", (9, 0), True), (2, 128, 4, 64), (2, 128, 4, 64), 64, "bfloat16")
    for changes, why in (
        ({}, None),
        ({"query": (2, 1, 4, 64)}, "1 queries and 128 keys"),
        ({"query": (2, 197, 4, 64), "key": (2, 197, 4, 64)}, "197 tokens do not divide by the 4"),
        ({"rows": 3}, "batch of 2 does not divide by the 3"),
    ):
        choice = choose(Facts(**{**vars(call), "tokens": 4, **changes}))
        assert (choice.body == "ring") == (why is None), choice
        assert why is None or why in (choice.reason or "")
