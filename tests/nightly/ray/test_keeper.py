"""What Ray is told of checkpoints, by which it chooses those that stay; without a cluster."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

import kmodels
from kmodels.checkpoint import manager

pytestmark = [pytest.mark.across("torch"), pytest.mark.needs("ray")]


@pytest.fixture
def reports(monkeypatch):
    """The metrics by the name of the checkpoint that were reported to Ray."""
    from ray import train

    found = {}

    def report(metrics, checkpoint, checkpoint_upload_fn, **_):
        checkpoint_upload_fn(checkpoint, "")
        found[checkpoint.path.rpartition("/")[2]] = metrics

    storage = SimpleNamespace(experiment_fs_path="/run", storage_filesystem=None)
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(train, "report", report)
    monkeypatch.setattr(train, "get_context", lambda: context)
    monkeypatch.setattr(train, "get_all_reported_checkpoints", list)
    yield found
    manager.set_keeper(None)


def fit(folder, best, mode, settings=None, epochs=3):
    """Epochs of two steps, with a checkpoint after each and one within each."""
    from kmodels.distribution.ray.inside import _RayKeeper

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    manager.set_keeper(_RayKeeper(str(folder), best, mode))
    checkpoint = kmodels.callbacks.Checkpoint(folder / "checkpoints", every=1, **(settings or {}))
    x = np.ones((4, 2))
    history = model.fit(
        x, x[:, :1], 2, epochs=epochs, verbose=0, shuffle=False, callbacks=[checkpoint]
    )
    return history.history["loss"]


ENDS = ["step_00000002", "step_00000004", "step_00000006"]


@pytest.mark.parametrize(
    ("best", "mode", "settings", "sign"),
    [
        ("loss", "min", {}, 1),
        ("loss", "max", {}, 1),
        (True, "max", {"best": "loss"}, -1),
        (True, "max", {"best": "loss", "mode": "max"}, 1),
    ],
)
def test_scores_are_those_of_epochs(best, mode, settings, sign, reports, tmp_path):
    losses = fit(tmp_path, best, mode, settings)
    worst = 1e300 if mode == "min" else -1e300
    assert [reports[name]["score"] for name in ENDS] == [sign * loss for loss in losses]
    assert {reports[name]["score"] for name in reports.keys() - set(ENDS)} == {worst}
    before = dict(reports)
    reports.clear()
    # Where the run continues under another driver, Ray's list is empty.
    fit(tmp_path, best, mode, settings, epochs=4)
    assert {name: reports[name]["score"] for name in before} == {
        name: found["score"] for name, found in before.items()
    }


def test_without_a_best_epoch_the_newest_stay(reports, tmp_path):
    fit(tmp_path, True, "max")
    assert [found["score"] for found in reports.values()] == list(range(1, 7))
    reports.clear()
    fit(tmp_path / "other", None, "min")
    assert not any("score" in found for found in reports.values())
