"""A model that was trained outside of `fit` is filled by a checkpoint all the same."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from exchange import load


@pytest.fixture(scope="module")
def runs():
    return load(Path(__file__).parent / "run_on_backend.py")


def test_steps_outside_of_fit_leave_nothing_behind(runs, tmp_path):
    expected = runs.fit(runs.make_model("sgd"), tmp_path / "run")
    for path in (tmp_path / "run").glob("step_*"):
        if path.name != f"step_{runs.SAVED:08d}":
            shutil.rmtree(path)
    model = runs.make_model("sgd")
    runs.more(model)
    runs.keras.utils.set_random_seed(3)
    losses = runs.fit(model, tmp_path / "run")[runs.SAVED - runs.LAST :]
    np.testing.assert_array_equal(losses, expected[runs.SAVED :])
