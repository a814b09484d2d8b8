"""One source, three backends: distillation, a GAN, SigLIP's loss and DPO have the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kmodels
from tolerances import tolerance

SCRIPT = Path(__file__).parent / "run_train_steps.py"
BACKENDS = ("jax", "torch", "tensorflow")
pytestmark = pytest.mark.across("torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each backend found, side by side."""
    folder = tmp_path_factory.mktemp("steps")
    source = str(Path(kmodels.__file__).parents[1])
    running = {
        name: subprocess.Popen(
            [sys.executable, SCRIPT, folder / name],
            env={**os.environ, "KERAS_BACKEND": name, "PYTHONPATH": source},
        )
        for name in BACKENDS
    }
    for process in running.values():
        assert process.wait(timeout=280) == 0
    return {name: json.loads((folder / name).read_text()) for name in BACKENDS}


@pytest.mark.parametrize("proof", ["distillation", "gan", "contrastive", "preference"])
def test_losses_are_equal_on_all_backends(found, proof):
    steps = {name: found[name][proof]["steps"] for name in BACKENDS}
    for name in BACKENDS[1:]:
        limit = tolerance("losses")
        np.testing.assert_allclose(steps[name], steps["jax"], rtol=0, atol=limit, err_msg=name)
    assert len(steps["jax"]) == 20
    if proof != "gan":
        assert np.mean(steps["jax"][-3:]) < np.mean(steps["jax"][:3])
    if proof == "preference":
        # Adapters begin at zero: policy and reference are one.
        assert steps["jax"][0] == pytest.approx(np.log(2), abs=1e-6)


def test_moving_statistics_are_equal_on_all_backends(found):
    moving = [found[name]["gan"]["moving"] for name in BACKENDS]
    assert len(moving[0]) == 4
    for other in moving[1:]:
        np.testing.assert_allclose(other, moving[0], rtol=0, atol=tolerance("losses"))
