"""Names that Keras counts: what is the same model built again, and what is another one."""

import pytest

from kmodels.training.counted import as_counted


def found_as(stored, wanted):
    found = {"model": {name: number for number, name in enumerate(stored)}}
    return as_counted(found, {"model": dict.fromkeys(wanted)})["model"]


def test_numbers_move_together_and_keep_their_order():
    stored = ["dense/kernel", "dense_9/kernel", "dense_10/kernel", "block_0/norm/scale", "x:slot"]
    wanted = ["dense_2/kernel", "dense_11/kernel", "dense_12/kernel", "block_0/norm_3/scale"]
    assert found_as(stored, [*wanted, "x:slot"]) == dict(
        zip([*wanted, "x:slot"], range(5), strict=True)
    )
    assert found_as(["dense_2/kernel:momentum"], ["dense/kernel:momentum"]) == {
        "dense/kernel:momentum": 0
    }


@pytest.mark.parametrize(
    "wanted",
    [
        ["dense_2/kernel", "dense_4/kernel"],  # Not the same distance.
        ["dense_2/kernel", "hidden/kernel"],
        ["dense_2/kernel"],
        ["block_1/kernel", "block_2/kernel"],
    ],
)
def test_other_differences_are_left_to_the_comparison(wanted):
    stored = ["block_0/kernel", "block_1/kernel"] if "block" in wanted[0] else None
    stored = stored or ["dense/kernel", "dense_1/kernel"]
    assert list(found_as(stored, wanted)) == stored
