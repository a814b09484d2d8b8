"""The folder of a run, read for a page."""

import csv
import dataclasses
import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import local_path

# Metrics of which more is better; of all others, as of losses, less is.
MORE_IS_BETTER = ("accuracy", "margin")
# By the class of the model: the command that uses it, and the last line in Python.
_PREDICT, _GENERATE = "kmodels predict {} photo.jpg", "kmodels generate {} --prompts FILE"
_SEGMENT, _REPLY = 'model.segment("photo.jpg")', 'model.generate("...", strip_prompt=True)'
USES = {
    "ViTImageClassifier": (_PREDICT, 'model.decode_predictions(model.predict("photo.jpg"))'),
    "ViTImageSegmenter": (_PREDICT, _SEGMENT),
    "EoMTImageSegmenter": (_PREDICT, _SEGMENT),
    "ImageTextSimilarity": (
        f"{_PREDICT} --names cat,dog",
        'model.classify(["photo.jpg"], ["cat", "dog"])',
    ),
    "GemmaCausalLM": (_GENERATE, _REPLY),
    "Qwen3CausalLM": (_GENERATE, _REPLY),
    "Gemma3ImageTextLM": (
        "kmodels chat {} --image photo.jpg",
        'model.generate({"images": "photo.jpg", "prompts": "..."}, strip_prompt=True)',
    ),
}
# Settings that belong to one call rather than to the run.
OF_A_CALL = ("out", "resume", "evaluate")


@dataclasses.dataclass(frozen=True)
class Run:
    """The files that a recipe left in its folder; those that are missing are empty.

    Attributes:
        folder: where it is.
        settings: config.json, without the recipe's name.
        result: result.json, or evaluation.json where nothing was trained.
        notes: run.json.
        predictions: predictions.json.
        rows: history.csv, numbers as such.
    """

    folder: Path
    settings: dict[str, Any]
    result: dict[str, Any]
    notes: dict[str, Any]
    predictions: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self._first("recipe") or self.settings.get("recipe") or "run"

    @property
    def model(self) -> str:
        """The name of the architecture, or where the weights came from."""
        return self._first("model", "preset") or self.settings.get("preset") or "run"

    @property
    def backend(self) -> str | None:
        """The backend of Keras."""
        return self._first("backend")

    @property
    def device(self) -> str | None:
        """The name of the device, and how many there were."""
        return self._first("device")

    @property
    def precision(self) -> str | None:
        """The dtype policy of the model."""
        return self._first("precision")

    @property
    def data(self) -> dict[str, Any]:
        """The facts about the data that `introduce` noted, or only the setting."""
        return self.notes.get("data") or {"source": self.settings.get("data")}

    @property
    def metrics(self) -> dict[str, Any]:
        """Numbers by Keras' log names, of the end of the run."""
        return self.result.get("metrics") or {}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of the steps."""
        return [row for row in self.rows if row["row"] == "step"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows of the epochs."""
        return [row for row in self.rows if row["row"] == "epoch"]

    @property
    def started(self) -> datetime | None:
        """The time when its first part began, with the time zone of that machine."""
        parts = self.notes.get("parts") or [{}]
        text = parts[0].get("started")
        return None if text is None else datetime.fromisoformat(text)

    @property
    def seconds(self) -> float | None:
        """The seconds that all of its parts took, as far as they are known."""
        known = [part["seconds"] for part in self.notes.get("parts", ()) if part["seconds"]]
        return sum(known) if known else None

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return bool(self.result)

    @cached_property
    def best(self) -> tuple[str, dict[str, Any]] | None:
        """The metric by which epochs are compared, and the row of the best one."""
        name = self.notes.get("best") or "val_loss"
        rows = [row for row in self.epochs if isinstance(row.get(name), float)]
        if not rows:
            return None
        return name, (max if more_is_better(name) else min)(rows, key=lambda row: row[name])

    @cached_property
    def use(self) -> list[str]:
        """A command and lines of Python that use the model; empty before there is one."""
        adapter, file = self.folder / "adapter", self.folder / "model" / "config.json"
        if not file.is_file():
            base = self.settings.get("weights") or self.folder / "base"
            return [f"kmodels chat {base} --adapter {adapter}"] if adapter.is_dir() else []
        described = json.loads(file.read_text(encoding="utf-8"))
        name = described.get("class") if isinstance(described, dict) else None
        if name not in USES:
            return []
        command, line = USES[name]
        load = f'model = kmodels.models.{name}.from_preset("{self.folder}/model")'
        return [command.format(self.folder), "", "# Python", "import kmodels", load, line]

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from their defaults: (value, default) by name."""
        defaults = self.notes.get("defaults", {})
        return {
            name: (value, defaults[name])
            for name, value in self.settings.items()
            if name in defaults and name not in OF_A_CALL and value != defaults[name]
        }

    @property
    def unchanged(self) -> dict[str, Any]:
        """All other settings."""
        return {
            name: value
            for name, value in self.settings.items()
            if name not in self.changed and name not in ("recipe", *OF_A_CALL)
        }

    def _first(self, *names: str) -> Any:
        found = (held.get(name) for held in (self.notes, self.result) for name in names)
        return next(filter(None, found), None)


def more_is_better(name: str) -> bool:
    """Returns whether the best of several values of a metric is the largest."""
    return name.endswith(MORE_IS_BETTER)


def read(folder: str | Path) -> Run:
    """Returns what the folder of a run holds.

    Args:
        folder: of a run of a recipe, finished or not.

    Raises:
        InputError: where it holds no run, or a file that cannot be read.
    """
    folder = local_path(folder)
    settings = _json(folder / "config.json")
    result = _json(folder / "result.json") or _json(folder / "evaluation.json")
    if not settings and not result:
        raise InputError(f"{folder} holds no run: no config.json; give the directory of a recipe")
    notes, predictions = (_json(folder / name) for name in ("run.json", "predictions.json"))
    return Run(folder, settings, result, notes, predictions, _rows(folder / "history.csv"))


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]
    # A process that was killed may have left half a row.
    return [row for row in rows if isinstance(row.get("step"), float)]


def _value(text: str | None) -> Any:
    try:
        return float(text or "")
    except ValueError:
        return text or None
