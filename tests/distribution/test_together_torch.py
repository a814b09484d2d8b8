"""Torch: two and four processes train what one alone trains, and are equal bit by bit."""

import keras
import numpy as np
import pytest
from launch import Process, launch, torch_ranks

from tolerances import tolerance

if keras.backend.backend() != "torch":
    pytest.skip("torchrun is torch's", allow_module_level=True)

import together_torch
from together_torch import CASES

pytestmark = pytest.mark.multiprocess
FOUR = ("plain", "accumulated_by_kmodels", "gemma_lora", "players")


@pytest.fixture(scope="module")
def alone():
    return {name: case(None) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def two():
    return _run(2, CASES)


@pytest.fixture(scope="module")
def four():
    return _run(4, FOUR)


def _run(count, names):
    script = together_torch.__file__
    ranks = [Process(script, list(names), env) for env in torch_ranks(count)]
    return [output.result() for output in launch(ranks, seconds=200)]


def _same_numbers(found, wanted, what="losses_of_ranks", dtype="float32"):
    assert found["history"].keys() == wanted["history"].keys()
    for name, values in wanted["history"].items():
        np.testing.assert_allclose(
            found["history"][name], values, atol=tolerance(what, dtype), rtol=0, err_msg=name
        )
    for step, (one, other) in enumerate(zip(found["steps"], wanted["steps"], strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(
                one[name], other[name], atol=tolerance(what, dtype), rtol=0,
                err_msg=f"{name} at step {step}",
            )  # fmt: skip


def _same_ranks(ranks, name):
    for rank in ranks[1:]:
        assert rank[name]["history"] == ranks[0][name]["history"]
        assert rank[name]["steps"] == ranks[0][name]["steps"]
        assert rank[name]["digest"] == ranks[0][name]["digest"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dropped", "half")])
def test_two_train_what_one_trains(name, alone, two):
    _same_ranks(two, name)
    _same_numbers(two[0][name], alone[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_train_what_one_trains(name, alone, four):
    _same_ranks(four, name)
    _same_numbers(four[0][name], alone[name])


def test_half_precision(alone, two):
    _same_ranks(two, "half")
    _same_numbers(two[0]["half"], alone["half"], dtype="bfloat16")


def test_inner_steps_of_accumulation_reduce_nothing(two):
    """What is summed is each process's own until the last step, and nothing after it."""
    for name, steps in (("accumulated_by_keras", 2), ("accumulated_by_kmodels", 4)):
        first, second = (rank[name]["accumulated"] for rank in two)
        for step, (one, other) in enumerate(zip(first, second, strict=True)):
            inner = (step + 1) % steps != 0
            assert (one != other) == inner, f"{name}, step {step}"
    skipping = [rank["accumulated_or_skipped"]["accumulated"] for rank in two]
    assert skipping[0] == skipping[1]


def test_dropout_differs_between_ranks_and_can_be_repeated(alone, two):
    for run in (*(rank["dropped"] for rank in two), alone["dropped"]):
        assert run["first"] == run["second"]
    _same_ranks([rank["dropped"] for rank in two], "first")
    one, first, second = (run["dropped"] for run in (alone, *two))
    assert first["drawn"] == one["drawn"]
    assert all(a != b for a, b in zip(first["drawn"], second["drawn"], strict=True))
    # The state is saved once, and restored by all.
    assert first["state"] == second["state"] == one["state"]
    assert first["first"]["history"] != one["first"]["history"]


def test_adapters_alone_are_reduced(two):
    for rank in two:
        assert rank["gemma_lora"]["frozen"]
        assert rank["gemma_lora"]["reduced"] == [rank["gemma_lora"]["trained"]]


def test_what_cannot_be_is_said_in_one_line(two):
    parts = {
        "bare": "got Sequential, whose step is Keras' own; give a task of kmodels",
        "norm": "BatchNormalization, which would norm by one process's rows alone; freeze it",
        "wrapped": "BatchNorm1d.*use torch.nn.SyncBatchNorm",
        "sum": "reduction 'sum', which the parts of a batch do not know",
        "other": r"differs between the processes: 1 variables.*on process 1 what",
        "idle": "leaves 1 of 2 processes without work; start 1, or give data=-1",
        "model": "Keras 3.16",
    }
    for rank in two:
        assert rank["refused"].keys() == parts.keys()
        for name, part in parts.items():
            with pytest.raises(AssertionError, match=part):
                raise AssertionError(rank["refused"][name])
            assert "\n" not in rank["refused"][name]
