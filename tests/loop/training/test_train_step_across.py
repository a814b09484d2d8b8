"""One source, three backends: a GAN and DPO have the same losses."""

import json
from pathlib import Path

import numpy as np
import pytest

from exchange import BACKENDS, find, leave
from tolerances import tolerance

SCRIPT = Path(__file__).parent / "run_train_steps.py"
PROOFS = ("gan", "preference")


def read(folder):
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def found(exchange):
    return {name: read(folder) for name, folder in find(exchange, SCRIPT).items()}


def test_each_learns(exchange, backend):
    found = read(leave(exchange, backend, SCRIPT))
    steps = found["preference"]["steps"]
    assert len(steps) == len(found["gan"]["steps"]) == 20
    assert np.mean(steps[-3:]) < np.mean(steps[:3])
    # Adapters begin at zero: policy and reference are one.
    assert steps[0] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.across("torch")
@pytest.mark.parametrize("proof", PROOFS)
def test_losses_are_equal_on_all_backends(found, proof):
    steps = {name: found[name][proof]["steps"] for name in BACKENDS}
    for name in BACKENDS[1:]:
        limit = tolerance("losses")
        np.testing.assert_allclose(steps[name], steps["jax"], rtol=0, atol=limit, err_msg=name)


@pytest.mark.across("torch")
def test_moving_statistics_are_equal_on_all_backends(found):
    moving = [found[name]["gan"]["moving"] for name in BACKENDS]
    assert len(moving[0]) == 4
    for other in moving[1:]:
        np.testing.assert_allclose(other, moving[0], rtol=0, atol=tolerance("losses"))
