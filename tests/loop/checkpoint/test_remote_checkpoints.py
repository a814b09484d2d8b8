"""Checkpoints in a bucket: a run continues on another machine, and what is damaged is absent."""

import numpy as np
import pytest

pytest.importorskip("fsspec")
import fsspec
import keras

from kmodels.callbacks import Checkpoint
from kmodels.core import remote
from kmodels.training import restore_newest
from refusals import refused
from remote_storage import FailingFileSystem, files
from stopped_runs import fit, make_model

pytestmark = pytest.mark.needs("fsspec")
RUN = "failing://bucket/run"


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Gives a function that goes to another machine, with no local files."""
    FailingFileSystem.reset(empty=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    yield lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    assert not (tmp_path / "failing:").exists()


def weights(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights]


def trained(checkpoint, epochs):
    """Weights after so many epochs; each call begins with the model as a new process makes it."""
    model = make_model()
    fit(model, [checkpoint], epochs=epochs)
    return weights(model)


def restored():
    model = make_model()
    path = restore_newest(RUN, model)
    return path.name, weights(model)


def equal(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def steps():
    return remote.list_published(RUN)


def test_a_run_goes_on_on_another_machine(machine, tmp_path, capsys):
    whole = trained(Checkpoint(tmp_path / "local"), 3)
    assert not equal(trained(Checkpoint(RUN), 2), whole)
    assert len(steps()) == 2
    machine("second")
    assert equal(trained(Checkpoint(RUN), 3), whole)
    assert "resumed from" in capsys.readouterr().out
    assert len(steps()) == 2  # the oldest of three is gone
    assert all("/step_" in path for path in files("failing://bucket"))
    assert equal(restored()[1], whole)


def test_a_write_that_fails_leaves_the_former_checkpoint(machine):
    first = trained(Checkpoint(RUN), 1)
    held, writes = files("failing://bucket"), FailingFileSystem.writes
    assert writes >= 5
    for fail_at in (1, writes - 1, writes):
        FailingFileSystem.reset(fail_at)
        message = "cannot write failing://bucket/run/step_"
        refused(message, trained, Checkpoint(RUN), 2)
        assert FailingFileSystem.writes == fail_at
        assert files("failing://bucket") == held
        machine(f"after {fail_at}")
    assert equal(restored()[1], first)


def test_damage_there_makes_a_checkpoint_absent(machine):
    first = trained(Checkpoint(RUN), 1)
    trained(Checkpoint(RUN), 2)
    system = fsspec.filesystem("failing")
    old, new = steps()
    broken = next(p for p in files(f"{RUN}/{new}") if p.endswith("/model.safetensors"))
    system.pipe_file(broken, b"no weights")
    machine("second")
    name, found = restored()
    assert name == old and equal(found, first)


def test_a_new_run_refuses_what_is_there(machine):
    trained(Checkpoint(RUN), 1)
    machine("second")
    refused("holds checkpoints of a run", trained, Checkpoint(RUN, resume=False), 1)
    FailingFileSystem.reset(denied=True)
    message = "cannot read failing://bucket/run: PermissionError"
    refused(message, trained, Checkpoint(RUN), 2)
