"""history.csv, and runs logged to TensorBoard, Weights & Biases, MLflow and Trackio, offline."""

import csv
import importlib.util
import json
import struct
import time

import pytest

from command_line import run
from kmodels.runs import trackers
from kmodels.runs.history import COLUMNS, History
from refusals import refused

SETTINGS = {"preset": "vit_debug", "learning_rate": 1e-3, "weights": None}
STEPS = [
    {"row": "step", "epoch": 1, "step": step, "loss": 1 / step, "learning_rate": 1e-3}
    for step in (1, 2, 3)
]
EPOCH = {"row": "epoch", "epoch": 1, "step": 3, "loss": 0.5, "val_loss": 0.25}
LATER = {"row": "step", "epoch": 2, "step": 4, "loss": 0.125, "learning_rate": 5e-4}
# (name, step) -> value
WANTED = {
    **{("batch/loss", row["step"]): row["loss"] for row in [*STEPS, LATER]},
    ("epoch/val_loss", 3): 0.25,
    ("batch/learning_rate", 4): 5e-4,
    ("result/accuracy", 4): 0.75,
}


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert "preset" in str(events.Tensors("settings/text_summary")[0].tensor_proto)
    return {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }


def of_wandb(folder):
    """The records of its offline files, which lie in blocks as in LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    # Its own process writes the files, and may do so after `finish`: here as when Python exits.
    wandb.teardown()
    found, config = {}, {}
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        content, place, body = path.read_bytes(), 7, b""
        while place + 7 <= len(content):
            if place % 32768 > 32768 - 7:
                place += -place % 32768
            _, size, kind = struct.unpack("<IHB", content[place : place + 7])
            body += content[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record, body = Record.FromString(body), b""
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                found |= {(name, row["_step"]): value for name, value in row.items()}
                config |= {item.key: item.value_json for item in record.run.config.update}
    assert json.loads(config["preset"]) == "vit_debug"
    return found


def of_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("kmodels").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    assert run.data.params["preset"] == "vit_debug"
    return {
        (name, metric.step): metric.value
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    }


def of_trackio(folder):
    import trackio

    (run,) = trackio.Api().runs("kmodels")
    assert run.config["preset"] == "vit_debug"
    rows = trackio.SQLiteStorage.get_logs("kmodels", run.name)
    return {(name, row["step"]): value for row in rows for name, value in row.items()}


READ = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.across
@pytest.mark.filterwarnings("ignore")  # of four packages, in their own code
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.needs(m, n)) for n, m in trackers.MODULES.items()]
)
def test_a_run_and_its_resume_are_read_back_by_the_package(name, offline, tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    for step, rows in ((0, [*STEPS, EPOCH]), (3, [LATER])):
        history = History(folder / "history.csv", step, epochs=1)
        history.tracker = trackers.start(name, folder, SETTINGS, step)
        history.add(rows)
        if step == 0:
            trackers.give_up()
            time.sleep(1.1)  # Weights & Biases names its offline files by the second.
    (folder / "result.json").write_text(json.dumps({"steps": 4, "metrics": {"accuracy": 0.75}}))
    trackers.finish(folder)
    found = READ[name](folder)
    assert {key: found[key] for key in WANTED} == pytest.approx(WANTED)


@pytest.mark.across
@pytest.mark.needs("tensorboardX", "tensorboard")
def test_a_recipe_logs_where_log_to_says(offline, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KMODELS_SMALL", "1")
    out = tmp_path / "run"
    assert run("vit", "--steps", "3", "--log-to", "tensorboard", "--out", out) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert f"tensorboard --logdir {tmp_path}/run/tensorboard" in said
    found = of_tensorboard(out)
    rows = (out / "history.csv").read_text()
    assert f",{found['batch/loss', 1]:.4f}"[:6] in rows
    assert ("result/accuracy", 3) in found


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    for name in trackers.MODULES:
        refused(rf"--log-to {name} needs .*'kmodels\[{name}\]'", trackers.check, name)


def test_a_tracker_that_refuses_ends_in_one_line(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(trackers, "check", lambda name: None)
    monkeypatch.setitem(trackers._TRACKERS, "wandb", refuse)
    message = "--log-to wandb cannot start: no API key configured"
    refused(message, trackers.start, "wandb", tmp_path, {}, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["log", "finish"])
def test_a_tracker_that_fails_costs_no_run(broken, tmp_path, monkeypatch, capsys):
    calls = []

    class Tracker:
        run_id = shown_by = "1"

        def log(self, metrics, step):
            self.call("log", metrics)

        def finish(self, code):
            self.call("finish", code)

        def call(self, name, value):
            calls.append((name, value))
            if name == broken:
                raise ConnectionError("no route\nto the server")

    monkeypatch.setattr(trackers, "check", lambda name: None)
    monkeypatch.setitem(trackers._TRACKERS, "wandb", lambda *arguments: Tracker())
    history = History(tmp_path / "history.csv")
    history.tracker = trackers.start("wandb", tmp_path, {}, 0)
    history.add([step(1)])
    history.add([step(2)])
    (tmp_path / "result.json").write_text(
        '{"metrics": {"loss": null, "accuracy": 0.5}, "steps": 2}'
    )
    trackers.finish(tmp_path)
    trackers.give_up()
    assert len(read(tmp_path / "history.csv")) == 2
    assert capsys.readouterr().out.count("failed (no route to the server); the run continues") == 1
    names = [name for name, _ in calls]
    assert names == (["log", "finish"] if broken == "log" else ["log"] * 3 + ["finish"])
    assert calls[-1] == ("finish", broken == "log")
    assert broken == "log" or calls[-2] == ("log", {"result/accuracy": 0.5})


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def step(number, **values):
    return {"row": "step", "epoch": 1, "step": number, "loss": 0.5, **values}


def test_metrics_of_its_own_get_a_column_each(tmp_path):
    path = tmp_path / "history.csv"
    history = History(path)
    history.add([step(1), step(2)])
    assert list(read(path)[0]) == list(COLUMNS)
    history.add([{"row": "epoch", "epoch": 1, "step": 2, "loss": 0.5, "margin": 0.1 + 0.2}])
    history.add([step(3, val_margin=1e-9)])
    rows = read(path)
    assert list(rows[0]) == [*COLUMNS, "margin", "val_margin"]
    assert [row["margin"] for row in rows] == ["", "", repr(0.1 + 0.2), ""]
    assert rows[3]["val_margin"] == "1e-09"


def test_a_resumed_run_reads_them_back(tmp_path):
    path = tmp_path / "history.csv"
    first = History(path)
    first.add([step(1, margin=0.25), step(2, margin=0.5)])
    with path.open("a") as file:
        file.write("step,1,3")  # the process was killed meanwhile
    resumed = History(path, until=1)
    assert resumed.rows == [step(1, margin=0.25)]
    resumed.add([step(2, margin=0.75)])
    assert [row["margin"] for row in read(path)] == ["0.25", "0.75"]
