"""A run that was saved on one backend continues with another as if it had stayed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from arrays import assert_equal, read_npz
from exchange import BACKENDS, find, leave, load
from kmodels.checkpoint.keras_file import load_keras_file
from refusals import refused
from tolerances import tolerance

SCRIPT = Path(__file__).parent / "run_on_backend.py"
OPTIMIZERS = ("ours", "our_sgd", "adamw", "sgd", "adafactor", "lion", "muon", "tuned")
across = pytest.mark.across(*BACKENDS)


@pytest.fixture(scope="module")
def runs():
    return load(SCRIPT)


@pytest.fixture(scope="module")
def written(exchange):
    return find(exchange, SCRIPT)


@pytest.fixture(scope="module")
def left(exchange, backend):
    return leave(exchange, backend, SCRIPT)


def losses_of(folder, optimizer):
    return json.loads((folder / f"{optimizer}.json").read_text())


def test_a_run_of_each_optimizer_is_left_for_the_others(left):
    for optimizer in OPTIMIZERS:
        losses = losses_of(left, optimizer)
        assert np.mean(losses[-8:]) < np.mean(losses[:8])


def test_steps_outside_of_fit_leave_nothing_behind(runs, left, tmp_path):
    """A checkpoint fills a model all the same that was trained outside of `fit`."""
    shutil.copytree(left / "sgd", tmp_path / "run")
    model = runs.make_model("sgd")
    runs.more(model)
    runs.keras.utils.set_random_seed(3)
    losses = runs.fit(model, tmp_path / "run")[runs.SAVED - runs.LAST :]
    np.testing.assert_array_equal(losses, losses_of(left, "sgd")[runs.SAVED :])


@pytest.mark.each_time("ours", "adamw")
@across
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_as_on_the_other_backend(runs, written, tmp_path, optimizer):
    """Weights and slots are equal bit by bit, and the next losses nearly."""
    model = runs.make_model(optimizer)
    for name, source in written.items():
        folder = tmp_path / name
        shutil.copytree(source / optimizer, folder)
        runs.Checkpoint(folder).prepare(model)
        found, saved = runs.values(model), read_npz(source / f"{optimizer}_saved.npz")
        limit = tolerance("logits_across")
        assert_equal([found.pop("outputs")], [saved.pop("outputs")], limit)
        # Counts may be wider on another backend.
        assert_equal({key: x.astype(saved[key].dtype) for key, x in found.items()}, saved)
        runs.keras.utils.set_random_seed(3)
        losses = runs.fit(model, folder)
        expected = losses_of(source, optimizer)
        assert len(expected) == runs.LAST
        got = losses[runs.SAVED - runs.LAST :]
        np.testing.assert_allclose(
            got, expected[runs.SAVED :], rtol=0, atol=tolerance("losses"), err_msg=name
        )


@across
@pytest.mark.parametrize("optimizer", ("adamw", "sgd"))
def test_a_keras_file_gives_weights_and_optimizer(runs, written, optimizer):
    model = runs.make_model(optimizer)
    for source in written.values():
        load_keras_file(source / f"{optimizer}.keras", model)
        expected = read_npz(source / f"{optimizer}.npz")
        outputs = np.asarray(model.predict(runs.X, verbose=0))
        limit = tolerance("logits")
        np.testing.assert_allclose(outputs, expected["outputs"], rtol=0, atol=limit)
        limit = tolerance("losses")
        np.testing.assert_allclose(runs.more(model), expected["losses"], rtol=0, atol=limit)


@across
def test_a_keras_file_of_another_optimizer_changes_nothing(runs, written):
    model = runs.make_model("adamw")
    before = [np.array(variable) for variable in model.get_weights()]
    file = written["torch"] / "sgd.keras"
    refused("has 8 variables of an optimizer, the model's has 13", load_keras_file, file, model)
    assert_equal(before, model.weights)
    load_keras_file(file, model, optimizer=False)
    outputs = np.asarray(model.predict(runs.X, verbose=0))
    expected = read_npz(written["torch"] / "sgd.npz")["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=tolerance("logits"))
