"""`kmodels parity` finds a planted difference, and none where there is none."""

import json
import math

import keras
import numpy as np
import pytest

from command_line import run
from kmodels.models import ViTImageClassifier
from kmodels.tools.compare_backends.options import TOLERANCES, ParityOptions, Side
from kmodels.tools.compare_backends.parity import difference, stages
from refusals import refused

BACKEND = keras.backend.backend()


@pytest.mark.each_backend("nightly")
def test_a_planted_difference_is_found(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    model = ViTImageClassifier.from_preset("vit_debug")
    kernel = model.backbone.get_layer("block_1").mlp.up.kernel
    values = np.array(keras.ops.convert_to_numpy(kernel))
    values[3, 5] += 0.05
    kernel.assign(values)
    model.save_to_preset(tmp_path / "other")
    both = f"{BACKEND},{BACKEND}"
    code = run(
        *("parity", "vit_debug", "--backends", both, "--preset-b", tmp_path / "other"),
        *("--out", tmp_path),
    )
    printed = capsys.readouterr().out
    assert code == 1
    found = json.loads((tmp_path / "parity.json").read_text())
    assert not found["equal"]
    first = found["first"]
    assert (first["step"], first["stage"], first["tensor"]) == (1, "forward", "block_1")
    assert "first difference: step 1, forward, block_1: differs by" in printed
    weight = next(text for text in first["weights"] if "block_1/mlp/up/kernel" in text)
    assert weight.startswith(f"{kernel.path}: differs by 0.05 at (3, 5)")
    assert f"already different before that step: {weight}" in printed


@pytest.mark.nightly
@pytest.mark.across("torch")
@pytest.mark.parametrize(
    ("preset", "pair", "more"),
    [
        ("gemma3_debug", "torch,tensorflow", ("--precision", "mixed_bfloat16")),
        ("vit_debug", "torch,jax", ("--ops", "generic,override")),
    ],
)
def test_backends_are_equal(preset, pair, more, tmp_path):
    more = (*more, "--steps", 2, "--out", tmp_path)
    assert run("parity", preset, "--backends", pair, *more) == 0
    found = json.loads((tmp_path / "parity.json").read_text())
    assert found["equal"] and found["first"] is None
    stages = [(stage["step"], stage["stage"]) for stage in found["stages"]]
    parts = ("forward", "loss", "gradients", "weights")
    assert stages == [(step, part) for step in (1, 2) for part in parts]
    assert all(0 <= stage["apart"] <= 1 for stage in found["stages"])
    # Two backends never round all values alike: something was compared.
    assert any(stage["apart"] > 0 for stage in found["stages"])


@pytest.mark.nightly
@pytest.mark.across("torch")
def test_with_dropout_the_forward_pass_is_compared(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    model = ViTImageClassifier.from_preset("vit_debug", dropout_rate=0.5, num_classes=10)
    model.save_to_preset(tmp_path / "dropping")
    assert run("parity", tmp_path / "dropping", "--backends", "torch,jax", "--out", tmp_path) == 0
    found = json.loads((tmp_path / "parity.json").read_text())
    assert [(stage["step"], stage["stage"]) for stage in found["stages"]] == [(1, "forward")]
    assert found["dropout"]
    assert "so only the forward pass without dropout is compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "index", "largest"),
    [
        ([[1.0, 2.0], [3.0, 4.5]], (1, 1), 0.5),
        ([[1.0, 2.0], [math.nan, 4.0]], (1, 0), math.inf),
        ([[1.0, math.inf], [3.0, 4.5]], (0, 1), math.inf),
    ],
)
def test_the_largest_difference_has_its_place_and_values(right, index, largest):
    left = [[1.0, 2.0], [3.0, 4.0]]
    found = difference("x", left, right, 1e-3, 0.0)
    assert (found.index, found.largest, found.allowed) == (index, largest, 4e-3)
    np.testing.assert_array_equal(found.values, (np.array(left)[index], np.array(right)[index]))
    assert found.is_beyond


def test_equal_values_and_small_differences_pass():
    assert not difference("x", [1.0, math.inf], [1.0, math.inf], 1e-3, 0.0).is_beyond
    assert not difference("x", [1.0, -2.0], [1.0, -2.001], 1e-3, 0.0).is_beyond
    assert difference("x", [1.0, -2.0], [1.0, -2.003], 1e-3, 0.0).is_beyond
    # What is rounding alone is measured by what stands beside it.
    assert difference("x", [1e-9], [-1e-9], 1e-3, 0.0).is_beyond
    assert not difference("x", [1e-9], [-1e-9], 1e-3, 0.01).is_beyond
    assert str(difference("x", [1.0], [[1.0]], 1e-3, 0.0)) == "x: the shapes differ"
    assert difference("x", [1.0], [[1.0]], 1e-3, 0.0).is_beyond


def test_the_first_in_the_order_of_computation_is_named():
    order = {"forward": ["a", "b", "c"], "loss": ["loss"]}
    left = {"forward:a": [1.0], "forward:b": [1.0], "forward:c": [1.0], "loss:loss": 2.0}
    right = left | {"forward:c": [5.0], "forward:b": [1.1]}
    forward, loss = stages(2, order, left, right, 1e-3)
    assert (forward.step, forward.name, forward.first.name, forward.worst.name) == (
        *(2, "forward", "b", "c"),
    )
    assert loss.first is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backends", "jax"), "backends is 'jax'; give two, separated by a comma"),
        (("--backends", "jax,theano"), "backends is 'theano'; give some of jax, torch"),
        (("--ops", "fast"), "ops is 'fast'; give some of override, generic"),
        (("--precision", "float32,float33"), "precision is 'float33'; give some of float32"),
        (("--tolerance", "2"), "tolerance is 2.0; give a share between 0 and 1"),
        (("--steps", "0"), "steps is 0; give at least 1"),
        (("--limit", "nan"), "the limit is nan; give seconds above 0"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message, capsys):
    one_line("parity", ("vit_debug", *arguments), message, capsys)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("parity", ("--op", "gelu", "--steps", "3"), "--steps has no effect on ops"),
        ("parity", ("--op", "gelu", "--backends", "jax,torch"), "--backends has no effect on ops"),
        ("bench", ("vit_debug", "--full", "--rank", "3"), "--rank has no effect with --full"),
        ("bench", ("vit_debug", "--rank", "3"), "--rank has no effect without --lora"),
        ("bench", ("vit_debug", "--sequence-length", "9"), "--sequence-length has no effect on im"),
        ("parity", ("vit_debug", "--sequence-length", "9"), "--sequence-length has no effect on i"),
        ("doctor", ("--ops", "--json"), "--ops has no effect with --json"),
        ("bench", ("vit_debug", "--memory", "1GiB"), "--memory has no effect without --largest-b"),
    ],
)
def test_flags_without_effect_are_one_line(command, arguments, message, capsys):
    one_line(command, arguments, message, capsys)


def one_line(command, arguments, message, capsys):
    assert run(command, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kmodels: {message}")
    assert len(error.strip().splitlines()) == 1


def test_the_roundings_of_both_sides_add_up_by_their_squares():
    sides = (Side("jax", "x", "float32"), Side("torch", "x", "mixed_bfloat16"))
    half = TOLERANCES["mixed_bfloat16"]
    assert ParityOptions(*sides).allowed == pytest.approx(half, rel=1e-5)
    assert ParityOptions(sides[1], sides[1]).allowed == pytest.approx(half * 2**0.5)
    assert ParityOptions(*sides, tolerance=0.5).allowed == 0.5
    assert sides[0].label(sides[1]) == "jax float32"
    refused("batch_size is 0; give at least 1", ParityOptions, *sides, batch_size=0)
