"""Experiment trackers that `--log-to` names: TensorBoard, Weights & Biases, MLflow and Trackio.

Each gets the rows of history.csv: steps as `batch/loss` and epochs as `epoch/val_loss`, as Keras'
callbacks name them, and the results at the end as `result/accuracy`. A resumed run continues the
tracker's run. The tracker's own settings decide where it sends its data: WANDB_MODE,
WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR and so on.
"""

import contextlib
import importlib.util
import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kmodels.core.errors import InputError, one_line, shown
from kmodels.core.files import atomic_write
from kmodels.core.schema import read_json
from kmodels.runs import console

PROJECT = "kmodels"
# The tracker's id of the run, for a resumed run; next to config.json.
ID_FILE = "tracker.json"
# The module of each tracker; the extra has the tracker's name.
MODULES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
_open: "Tracker | None" = None


class Tracker(Protocol):
    """A tracker of one run.

    Attributes:
        run_id: id of the run in the tracker.
        shown_by: command or address that shows the run.
    """

    run_id: str
    shown_by: str

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a step."""
        ...

    def finish(self, code: int) -> None:
        """Ends the run with the exit code of its process."""
        ...


def check(name: str) -> None:
    """Raises `InputError` before a run begins if the package of its tracker is not installed."""
    if importlib.util.find_spec(MODULES[name]) is None:
        raise InputError(
            f"--log-to {name} needs {MODULES[name]}, which is not installed: "
            f"pip install 'kmodels[{name}]'"
        )


def start(name: str, folder: Path, settings: Mapping[str, Any], step: int) -> Tracker:
    """Starts a tracker's run named as the folder, or continues the one of this folder.

    Args:
        name: a key of `MODULES`.
        folder: folder of the run.
        settings: the recipe's settings.
        step: finished steps of the resumed run.

    Raises:
        InputError: if the tracker cannot start, for example without an account.
    """
    global _open
    check(name)
    known = _read(folder / ID_FILE)
    try:
        tracker = _TRACKERS[name](folder, shown(dict(settings)), known.get(name), step)
    except Exception as error:
        reason = one_line(error)
        raise InputError(f"--log-to {name} cannot start: {reason}") from error
    text = json.dumps({**known, name: tracker.run_id}, indent=1) + "\n"
    atomic_write(folder / ID_FILE, lambda path: path.write_text(text))
    _open = tracker
    return tracker


def log_rows(tracker: Tracker, rows: list[dict[str, Any]]) -> None:
    """Records rows of history.csv."""
    for row in rows:
        part = "batch" if row["row"] == "step" else "epoch"
        metrics = {f"{part}/{k}": v for k, v in row.items() if k not in ("row", "epoch", "step")}
        _log(tracker, {"epoch": row["epoch"], **metrics}, row["step"])


def finish(folder: Path) -> None:
    """Records the metrics of result.json and ends the tracker's run of this process, if any."""
    if _open is not None:
        result = _read(folder / "result.json")
        metrics = {f"result/{name}": value for name, value in result.get("metrics", {}).items()}
        _log(_open, metrics, result.get("steps", 0))
        _end(0)


def give_up() -> None:
    """Ends the tracker's run of a process that failed or was stopped, if any."""
    _end(1)


def _log(tracker: Tracker, metrics: Mapping[str, Any], step: int) -> None:
    """Records metrics; a tracker that fails is left out from then on, and costs no run."""
    if tracker is not _open:
        return
    try:
        # result.json has null for numbers that are not finite.
        tracker.log({name: x for name, x in metrics.items() if x is not None}, step)
    except Exception as error:
        _say_failed(error)
        _end(1)


def _end(code: int) -> None:
    global _open
    tracker, _open = _open, None
    try:
        if tracker is not None:
            tracker.finish(code)
    except Exception as error:
        _say_failed(error)


def _say_failed(error: Exception) -> None:
    console.say(
        f"--log-to failed ({one_line(error)}); the run continues without it, and history.csv has "
        "its rows"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except InputError:
        return {}


class _TensorBoard:
    """Event files in the run's folder, by tensorboardX; Keras' callback needs TensorFlow."""

    def __init__(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int):
        from tensorboardX import SummaryWriter

        self.run_id = "tensorboard"
        directory = str(folder / self.run_id)
        # Steps after a checkpoint run again; TensorBoard drops its rows of them. Files are named by
        # the second, so without a suffix a quick resume would replace the first one.
        purge = step + 1 if run_id else None
        self._writer = SummaryWriter(directory, purge_step=purge, filename_suffix=f".{step}")
        self._writer.add_text("settings", f"```json\n{json.dumps(settings, indent=1)}\n```", step)
        self.shown_by = f"tensorboard --logdir {directory}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, code: int) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int):
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=folder,
            config=settings,
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(silent=True),
        )
        self.run_id = self._run.id
        offline = f"wandb sync {folder}/wandb/offline-run-*"
        self.shown_by = offline if self._run.offline else str(self._run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


class _MLflow:
    """A run of MLflow's tracking server or database."""

    def __init__(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
            params = [Param(key, str(value)) for key, value in settings.items()]
            self._client.log_batch(run_id, params=params)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = run_id
        address = self._client.tracking_uri
        served = address.startswith(("http://", "https://", "databricks"))
        self.shown_by = address if served else f"mlflow ui --backend-store-uri {address}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def finish(self, code: int) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if code == 0 else "FAILED")


class _Trackio:
    """A run of Trackio, in TRACKIO_DIR or its usual folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], run_id: str | None, step: int):
        import trackio

        resume = "allow" if run_id else "never"
        # It prints several lines; `shown_by` has the important one.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                PROJECT, name=run_id or folder.name, config=settings, resume=resume, embed=False
            )
        self.run_id = self._run.name
        self.shown_by = f"trackio show --project {PROJECT}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, code: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


_TRACKERS = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow, "trackio": _Trackio}
