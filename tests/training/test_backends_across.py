"""A run that was saved on one backend goes on with another as if it had stayed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kmodels
from kmodels.errors import InputError
from kmodels.files import atomic_directory
from kmodels.training.keras_file import load_keras_file
from tolerances import tolerance

HERE = Path(__file__).parent
BACKENDS = ("jax", "torch", "tensorflow")
OPTIMIZERS = ("ours", "our_sgd", "adamw", "sgd", "adafactor", "lion", "muon")
pytestmark = pytest.mark.across(*BACKENDS)


@pytest.fixture(scope="module")
def runs():
    sys.path.insert(0, str(HERE))
    try:
        import run_on_backend
    finally:
        sys.path.remove(str(HERE))
    return run_on_backend


@pytest.fixture(scope="module")
def written(exchange):
    """Folder with what each backend has run."""
    for name in BACKENDS:
        folder = exchange / "runs" / name
        if folder.exists():
            continue
        source = Path(kmodels.__file__).parents[1]
        environment = {**os.environ, "KERAS_BACKEND": name, "PYTHONPATH": str(source)}
        with atomic_directory(folder) as new:
            command = [sys.executable, HERE / "run_on_backend.py", new]
            subprocess.run(command, env=environment, check=True, timeout=280)
    return exchange / "runs"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_slots_are_bit_equal(runs, written, tmp_path, optimizer):
    model = runs.make_model(optimizer)
    for name in BACKENDS:
        folder = tmp_path / name
        shutil.copytree(written / name / optimizer, folder)
        runs.Checkpoint(folder).prepare(model)
        found = runs.values(model)
        with np.load(written / name / f"{optimizer}_saved.npz") as expected:
            assert set(expected) == set(found)
            for key in set(expected) - {"outputs"}:
                # Counts may be wider on another backend.
                assert found[key].astype(expected[key].dtype).tobytes() == expected[key].tobytes()
            limit = tolerance("logits_across")
            np.testing.assert_allclose(found["outputs"], expected["outputs"], rtol=0, atol=limit)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_losses_are_those_of_the_other_backend(runs, written, tmp_path, optimizer):
    model = runs.make_model(optimizer)
    for name in BACKENDS:
        folder = tmp_path / name
        shutil.copytree(written / name / optimizer, folder)
        runs.keras.utils.set_random_seed(3)
        losses = runs.fit(model, folder)
        expected = json.loads((written / name / f"{optimizer}.json").read_text())
        assert len(expected) == runs.LAST
        got = losses[runs.SAVED % runs.STEPS :]  # without the replay
        np.testing.assert_allclose(
            got, expected[runs.SAVED :], rtol=0, atol=tolerance("losses"), err_msg=name
        )


@pytest.mark.parametrize("optimizer", ("adamw", "sgd"))
def test_a_keras_file_gives_weights_and_optimizer(runs, written, optimizer):
    model = runs.make_model(optimizer)
    for name in BACKENDS:
        load_keras_file(written / name / f"{optimizer}.keras", model)
        expected = np.load(written / name / f"{optimizer}.npz")
        outputs = np.asarray(model.predict(runs.X, verbose=0))
        limit = tolerance("logits")
        np.testing.assert_allclose(outputs, expected["outputs"], rtol=0, atol=limit)
        limit = tolerance("losses")
        np.testing.assert_allclose(runs.more(model), expected["losses"], rtol=0, atol=limit)


def test_a_keras_file_of_another_optimizer_changes_nothing(runs, written):
    model = runs.make_model("adamw")
    before = [np.array(variable) for variable in model.get_weights()]
    with pytest.raises(InputError, match="has 8 variables of an optimizer, the model's has 13"):
        load_keras_file(written / "torch" / "sgd.keras", model)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    load_keras_file(written / "torch" / "sgd.keras", model, optimizer=False)
    outputs = np.asarray(model.predict(runs.X, verbose=0))
    expected = np.load(written / "torch" / "sgd.npz")["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=tolerance("logits"))
