"""Weights and slots through Orbax's files: on other meshes, and never in part."""

import sys

import keras
import numpy as np
import pytest
import run_in_parts
from launch import ROOT, Process, jax_ranks, launch

from kmodels.checkpoint.manager import CheckpointError
from kmodels.training import load_orbax, save_orbax
from refusals import refused

SCRIPT = ROOT / "tests" / "loop" / "distribution" / "run_in_parts.py"


@pytest.mark.nightly
@pytest.mark.needs("orbax")
@pytest.mark.across("jax")
def test_bit_equal_on_any_mesh(tmp_path):
    told = [str(tmp_path), "orbaxed:fsdp=4+data=2,fsdp=2"]
    for output in launch([Process(SCRIPT, told, ranks=jax_ranks(2, 2))]):
        assert output.result() == {"restored on data=2,fsdp=2": []}
    saved = tmp_path / "orbax"
    with np.load(tmp_path / "orbax.npz") as expected:
        # In one process.
        for mesh in ("fsdp=2,model=2", None):
            _, model = run_in_parts.make(mesh)
            load_orbax(model, saved)
            assert run_in_parts.differing(model, expected) == []
    refused("orbax exists; give a new directory", save_orbax, model, saved)
    _, wrong = run_in_parts.make(None, keras.optimizers.SGD)
    before = run_in_parts.values(wrong)
    with pytest.raises(CheckpointError, match="orbax belongs to another model or optimizer: opti"):
        load_orbax(wrong, saved)
    (tmp_path / "empty").mkdir()
    refused("empty is not what save_orbax wrote", load_orbax, wrong, tmp_path / "empty")
    assert run_in_parts.differing(wrong, before) == []


def test_it_is_asked_for_where_it_is_not(backend, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    message = "Orbax needs the jax backend" if backend != "jax" else "pip install 'kmodels.orbax.'"
    _, model = run_in_parts.make(None)
    for act in (save_orbax, load_orbax):
        refused(message, act, model, tmp_path / "x")
