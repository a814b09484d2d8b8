"""The folder of a run, read for a page."""

import dataclasses
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.file_shapes import COUNT, NUMBER, Needed, Shape
from kmodels.core.files import local_path
from kmodels.core.schema import read_json
from kmodels.runs import history

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
# The types of what a run writes into its files.
NOTES = "run.json"
NOTED: Shape = {
    **dict.fromkeys(("recipe", "model", "backend", "device", "precision", "best"), str),
    **dict.fromkeys(("steps", "parameters", "trainable_parameters"), int),
    "data": {
        **dict.fromkeys(("source", "unit", "details"), str),
        **dict.fromkeys(("train", "validation", "test"), int),
        "classes": [str],
    },
    "defaults": {},
    "parts": [{"command": str, "started": str, "seconds": NUMBER}],
}
RESULT: Shape = {
    **dict.fromkeys(("recipe", "preset", "backend", "device", "precision"), str),
    **dict.fromkeys(
        ("steps", "epochs", "parameters", "trainable_parameters", "skipped_steps"), int
    ),
    **dict.fromkeys(
        ("samples_per_s", "step_ms_median", "compile_s", "peak_memory_mb", "wait_for_data_share"),
        NUMBER,
    ),
    "metrics": {"*": NUMBER},
    "versions": {"*": str},
    "overrides": {"*": str},
    "samples": [{"*": str}],
    "before": {},
    "after": {},
    "probe": {"ways": [{}], "map": {}},
}
_PICTURE: Shape = {
    **dict.fromkeys(("image", "label", "said", "second"), Needed(str)),
    "side": Needed(int),
    **dict.fromkeys(("confidence", "label_share"), Needed(NUMBER)),
}
PREDICTED: Shape = {
    "part": Needed(str),
    **dict.fromkeys(("right", "samples"), Needed(int)),
    "classes": Needed([Needed(str)]),
    "confusions": Needed([Needed([Needed(COUNT)] * 3)]),
    "groups": Needed({"*": [Needed(_PICTURE)]}),
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
        try:
            return datetime.fromisoformat(parts[0].get("started") or "")
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """The seconds that all of its parts took, as far as they are known."""
        known = [part["seconds"] for part in self.notes.get("parts", ()) if part.get("seconds")]
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
        name = read_json(file, {"class": str}).get("class")
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
    file = folder / "config.json"
    settings = read_json(file, {"recipe": str}) if file.is_file() else {}
    result = _json(folder / "result.json", RESULT) or _json(folder / "evaluation.json", RESULT)
    if not settings and not result:
        raise InputError(f"{folder} holds no run: no config.json; give the directory of a recipe")
    notes = _json(folder / NOTES, NOTED)
    predictions = _json(folder / "predictions.json", PREDICTED)
    _check_predictions(folder / "predictions.json", predictions)
    rows = history.read(file) if (file := folder / "history.csv").is_file() else []
    names = dict.fromkeys([*history.COLUMNS, *(name for row in rows for name in row)])
    rows = [{**names, **row} for row in rows]
    return Run(folder, settings, result, notes, predictions, rows)


def _check_predictions(path: Path, predictions: dict[str, Any]) -> None:
    """Raises InputError for confusions of classes that the file does not list."""
    if not predictions:
        return
    known = range(len(predictions["classes"]))
    if not known or any(x not in known for row in predictions["confusions"] for x in row[:2]):
        raise InputError(f"{path} does not say what each image and class was taken for")


def _json(path: Path, shape: Shape) -> dict[str, Any]:
    """Returns the object in a file without what is null, or nothing if there is no file."""
    found = read_json(path, shape) if path.is_file() else {}
    return {name: value for name, value in found.items() if value is not None}
