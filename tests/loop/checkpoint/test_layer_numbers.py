"""Names that Keras counts: what is the same model built again, and what is another one."""

import keras
import numpy as np
import pytest

import kmodels
from arrays import assert_equal, to_numpy
from kmodels.checkpoint.format import as_counted
from kmodels.training import load_orbax, save_orbax


def found_as(stored, wanted):
    found = {"model": {name: number for number, name in enumerate(stored)}}
    return as_counted(found, {"model": dict.fromkeys(wanted)})["model"]


@pytest.mark.once
def test_numbers_move_together_and_keep_their_order():
    stored = ["dense/kernel", "dense_9/kernel", "dense_10/kernel", "block_0/norm/scale", "x:slot"]
    wanted = ["dense_2/kernel", "dense_11/kernel", "dense_12/kernel", "block_0/norm_3/scale"]
    assert found_as(stored, [*wanted, "x:slot"]) == dict(
        zip([*wanted, "x:slot"], range(5), strict=True)
    )
    assert found_as(["dense_2/kernel:momentum"], ["dense/kernel:momentum"]) == {
        "dense/kernel:momentum": 0
    }


@pytest.mark.once
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


def cell(seed=0):
    """A frozen layer and a trained one, unnamed; Keras counts on with each call."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def test_a_cell_that_is_run_again_has_the_same_frozen_base(tmp_path):
    x = np.random.default_rng(0).random((8, 4)).astype("float32")

    def run(model, directory, epochs):
        kept = kmodels.callbacks.Checkpoint(directory, only_trainable=True)
        model.fit(x, x[:, :1], epochs=epochs, callbacks=[kept], verbose=0)
        return [to_numpy(v).copy() for v in (*model.weights, *model.optimizer.variables)]

    expected = run(cell(), tmp_path / "whole", 2)
    model = cell()
    run(model, tmp_path / "cut", 1)
    again = cell()
    assert [w.path for w in again.weights] != [w.path for w in model.weights]
    assert_equal(run(again, tmp_path / "cut", 2), expected)


@pytest.mark.needs("orbax")
@pytest.mark.across("jax")
def test_orbax_files_of_a_cell_that_is_run_again(tmp_path):
    model, again = cell(), cell(seed=1)
    save_orbax(model, tmp_path / "orbax")
    load_orbax(again, tmp_path / "orbax")
    assert_equal(again.weights, model.get_weights())
