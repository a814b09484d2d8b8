"""Checkpoints: whole or absent, every changed byte noticed, the former one never lost."""

import json

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels.checkpoint import format, manager, state
from kmodels.checkpoint.state import RunState
from kmodels.core.files import stamp
from kmodels.training import AdamW
from refusals import refused


def make_model(units=3):
    inputs = keras.Input((4,))
    x = keras.layers.Dropout(0.5, seed=1, name="drop")(inputs)
    x = keras.layers.Dense(5, name="first")(x)
    model = keras.Model(inputs, keras.layers.Dense(units, name="second")(x))
    model.compile(AdamW(0.1, ema=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fill(model, offset):
    for number, variable in enumerate([*model.variables, *model.optimizer.variables]):
        variable.assign(np.full(variable.shape, number + offset))


def contents(model):
    return [to_numpy(v).copy() for v in (*model.variables, *model.optimizer.variables)]


def save(folder, model, keep=2, best=None, **described):
    arrays = {part: state.copied(held) for part, held in state.parts(model, False).items()}
    return manager.save(folder, RunState(**described), arrays, keep, best)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def folder(model, tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        fill(model, 10 * step)
        save(tmp_path, model, step=step)
    return tmp_path


def test_everything_comes_back(model, folder):
    wanted = contents(model)
    fill(model, 0)
    path, found, passed_over = manager.newest(folder)
    assert (path.name, found.step, passed_over) == ("step_00000002", 2, [])
    manager.restore(path, found, model)
    assert_equal(contents(model), wanted)


def test_an_unbuilt_optimizer_is_built_first(folder):
    other = make_model()
    other.compile(AdamW(0.1, ema=0.9), "mse")
    path = folder / "step_00000002"
    manager.restore(path, manager.verify(path), other)
    first = next(v for v in other.optimizer.variables if v.name == "first_kernel_momentum")
    assert to_numpy(first).min() > 20


def test_evaluation_takes_the_moving_average(model, folder):
    averages = {v.name: to_numpy(v) for v in model.optimizer.variables}
    manager.restore_newest(folder, model)
    assert_equal([model.get_layer("first").kernel], [averages["first_kernel_average"]])


@pytest.mark.once
@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over(folder, name, damage):
    file = folder / "step_00000002" / name
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    path, _, passed_over = manager.newest(folder)
    assert path.name == "step_00000001"
    assert len(passed_over) == 1
    assert "step_00000002" in passed_over[0]


@pytest.mark.once
def test_when_none_verifies_all_are_named(folder):
    for step in (1, 2):
        (folder / f"step_0000000{step}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(manager.CheckpointError, match=r"no checkpoint in .* verifies") as e:
        manager.newest(folder)
    assert "step_00000001" in str(e.value)
    assert "step_00000002" in str(e.value)


@pytest.mark.once
def test_no_checkpoint_at_all(tmp_path, model):
    assert manager.newest(tmp_path / "nowhere") is None
    with pytest.raises(manager.CheckpointError, match="there is no checkpoint"):
        manager.restore_newest(tmp_path, model)


@pytest.mark.once
def test_old_ones_go(model, folder):
    for step in (3, 4):
        save(folder, model, step=step, keep=3)
    names = [path.name for path in manager.list_checkpoints(folder)]
    assert names == ["step_00000004", "step_00000003", "step_00000002"]


@pytest.mark.once
def test_the_best_one_stays(model, tmp_path):
    for step, value in enumerate([3.0, 1.0, 2.0, 1.0, float("nan")], 1):
        save(tmp_path, model, step=step, keep=1, best="loss", logs={"loss": value})
    names = [path.name for path in manager.list_checkpoints(tmp_path)]
    assert names == ["step_00000005", "step_00000002"]


@pytest.mark.once
@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_full_disk_costs_nothing(model, folder, monkeypatch, fails_at):
    calls = []
    real = format.write_safetensors

    def write(*arguments):
        calls.append(1)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(format, "write_safetensors", write)
    message = r"cannot write checkpoint .*step_00000003 of \d+ bytes: No space left on device; make"
    refused(message, save, folder, model, step=3)
    assert manager.newest(folder)[1].step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_checkpoint_of_another_model_fills_nothing(folder):
    other = make_model(units=4)
    before = contents(other)
    message = r"another model.*model: second/kernel is \(5, 3\), the model needs \(5, 4\)"
    path = folder / "step_00000002"
    with pytest.raises(manager.CheckpointError, match=message):
        manager.restore(path, manager.verify(path), other)
    assert_equal(contents(other), before)


@pytest.mark.once
def test_another_format_is_refused(folder):
    path = folder / "step_00000002"
    found = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**found, "format": 99}))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["state.json"] = stamp(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(manager.CheckpointError, match="format 99; this version reads format 3"):
        manager.verify(path)


def test_a_state_that_is_not_finite_is_not_saved(model, folder):
    kernel = model.get_layer("first").kernel
    kernel.assign(np.full((4, 5), np.inf))
    message = "first/kernel is not finite, so this state is not saved"
    refused(message, save, folder, model, step=3)
    assert manager.newest(folder)[1].step == 2


@pytest.mark.once
def test_one_that_does_not_verify_does_not_push_a_good_one_out(model, folder):
    (folder / "step_00000002" / "model.safetensors").write_bytes(b"")
    (folder / "step_00000002").rename(folder / "step_00000009")
    save(folder, model, step=3, keep=1)
    assert manager.newest(folder)[1].step == 3


def test_digest_sees_values_and_paths(model):
    fill(model, 0)
    before = state.weights_digest(model)
    assert state.weights_digest(model) == before
    kernel = model.get_layer("first").kernel
    kernel.assign(to_numpy(kernel) + 1)
    assert state.weights_digest(model) != before
