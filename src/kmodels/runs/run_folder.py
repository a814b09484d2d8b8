"""The directory of a run: written by a recipe, read by reports and commands."""

import dataclasses
import fcntl
import json
import math
import sys
import time
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError, shown
from kmodels.core.files import atomic_write, is_remote, local_path, no_link, remove_leftovers
from kmodels.core.metric_names import best_of
from kmodels.core.schema import COUNT, NUMBER, Needed, Shape, read_json, read_optional
from kmodels.runs import console, history

# By class of the model: the command that uses it, and the last line of an example in Python.
_PREDICT, _GENERATE = "kmodels predict {} photo.jpg", "kmodels generate {} --prompts FILE"
_SEGMENT, _REPLY = 'model.segment("photo.jpg")', 'model.generate("...", strip_prompt=True)'
USES = {
    "ViTImageClassifier": (_PREDICT, 'model.decode_predictions(model.predict("photo.jpg"))'),
    "ViTImageSegmenter": (_PREDICT, _SEGMENT),
    "EoMTImageSegmenter": (_PREDICT, _SEGMENT),
    "ViTObjectDetector": (_PREDICT, 'model.detect("photo.jpg")'),
    "ImageTextSimilarity": (
        f"{_PREDICT} --names cat,dog",
        'model.classify(["photo.jpg"], ["cat", "dog"])',
    ),
    "GemmaCausalLM": (_GENERATE, _REPLY),
    "Llama3CausalLM": (_GENERATE, _REPLY),
    "Qwen3CausalLM": (_GENERATE, _REPLY),
    "Gemma3ImageTextLM": (
        "kmodels chat {} --image photo.jpg",
        'model.generate({"images": "photo.jpg", "prompts": "..."}, strip_prompt=True)',
    ),
}
# The types in the files of a run.
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
        ("samples_per_s", "learnt_tokens_per_s", "step_ms_median", "compile_s", "peak_memory_mb"),
        NUMBER,
    ),
    "wait_for_data_share": NUMBER,
    "metrics": {"*": NUMBER},
    "versions": {"*": str},
    "overrides": {"*": str},
    "samples": [{"*": str}],
    "preferences": [{"prompt": str, "answers": [{"label": str, "text": str, "change": NUMBER}]}],
    "before": {},
    "after": {},
    "probe": {
        "ways": [{"name": Needed(str), "val": Needed(NUMBER), "test": Needed(NUMBER)}],
        "map": {"points": Needed([[NUMBER] * 3]), "classes": Needed([str])},
    },
}
_PICTURE: Shape = {
    **dict.fromkeys(("image", "label", "said", "second"), Needed(str)),
    "side": Needed(int),
    **dict.fromkeys(("confidence", "label_share"), Needed(NUMBER)),
}
PREDICTED: Shape = {
    "part": Needed(str),
    **dict.fromkeys(("right", "samples"), Needed(int)),
    "classes": Needed([str]),
    "confusions": Needed([[COUNT] * 3]),
    "groups": Needed({"*": [_PICTURE]}),
}
# The file of `kmodels eval` in a run: results on other data, by its path.
EVALUATIONS = "evaluations.json"
EVALUATED: Shape = {
    "*": {
        **{"task": Needed(str), "records": Needed(COUNT), "after": Needed({"*": Needed(NUMBER)})},
        "before": {"*": NUMBER},
    }
}
# Settings that belong to one call rather than to the run.
OF_A_CALL = ("config", "out", "resume", "evaluate")


def path_of(recipe: str, out: str | None) -> Path:
    """Returns the directory of a run, `out` or runs/<recipe>-<time>."""
    return local_path(out or f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")


def has_checkpoints(path: Path) -> bool:
    """Returns True if a directory holds checkpoints of a run."""
    return any((path / "checkpoints").glob("step_*"))


def check_new(path: Path, resume: bool) -> None:
    """Raises `InputError` if a directory holds a run that must not be overwritten."""
    if not resume and has_checkpoints(path):
        raise InputError(
            f"--out {path} holds checkpoints of a run; add --resume to continue it, or give "
            "another directory"
        )


class Folder:
    """The directory that a run writes to, locked against a second run until the process ends.

    Rank zero creates and locks it.

    Args:
        recipe: name of the recipe.
        out: the directory; runs/<recipe>-<time> by default.
        settings: settings of the run.
        resume: True if the directory may hold an earlier run.

    Raises:
        InputError: if it is not writable, holds a run, or another process uses it.
    """

    def __init__(self, recipe: str, out: str | None, settings: Any, resume: bool = False):
        self.recipe, self.settings = recipe, settings
        self._lock: Any = None
        self._parts: list[dict[str, Any]] = []
        self._begun = 0.0
        processes = joined_processes()
        self.main = processes is None or processes.is_rank_zero()
        if processes is None:
            self._take(out, resume)
        else:
            path = processes.broadcast("the folder of the run", lambda: self._take(out, resume))
            self.path = Path(path)

    def _take(self, out: str | None, resume: bool) -> str:
        self.path = path_of(self.recipe, out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Not truncated: another run may hold it.
            self._lock = open(self.path / ".lock", "a", opener=no_link)  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"cannot write to --out {self.path}: {error.strerror}; give another directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InputError(f"another run is using --out {self.path}; give another") from error
        try:
            check_new(self.path, resume)
            remove_leftovers(self.path)
        except InputError:
            self.close()
            raise
        return str(self.path)

    @property
    def has_checkpoints(self) -> bool:
        """True if a run was saved in it."""
        return has_checkpoints(self.path)

    def begin(self, command: str) -> None:
        """Begins a part of the run, which `note` writes to run.json with its command line."""
        if not self.main:
            return
        self._begun = time.monotonic()
        evaluates = getattr(self.settings, "evaluate", False)
        parts = (self._noted() or {}).get("parts") or []
        if evaluates and parts:
            return  # The file describes the training.
        began = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        self._parts = [*parts, {"command": command, "started": began, "seconds": None}]

    def note(self, **facts: Any) -> None:
        """Adds facts and the time so far to run.json; they replace older ones of their names."""
        if self._parts:
            self._parts[-1]["seconds"] = round(time.monotonic() - self._begun, 1)
            content = {**(self._noted() or {}), **facts, "parts": self._parts}
            self.write_json(NOTES, {"recipe": self.recipe, **content})

    def _noted(self) -> dict[str, Any] | None:
        try:
            return read_json(self.path / NOTES, NOTED)
        except InputError:  # it is written again
            return None

    def write_config(self) -> Path:
        """Writes the settings to config.json; a resumed run prints those that differ from it."""
        settings = dataclasses.asdict(self.settings)
        former = read_optional(self.path / "config.json", {}) if self.settings.resume else {}
        changes = [
            f"--{name.replace('_', '-')} was {former[name]}, is {value}"
            for name, value in shown(settings).items()
            if name in former and name not in OF_A_CALL and former[name] != value
        ]
        if changes:
            console.say(f"changed since the run began: {'; '.join(changes)}")
        self.note(defaults=_defaults(self.settings))
        return self.write_json("config.json", {"recipe": self.recipe, **settings})

    def write_json(self, name: str, content: dict[str, Any]) -> Path:
        """Writes a file of the run atomically, without the passwords of addresses.

        Only rank zero writes. Numbers that are not finite become null.
        """
        if not self.main:
            return self.path / name
        text = json_text(shown(content)) + "\n"
        return atomic_write(self.path / name, lambda path: path.write_text(text))

    def check_exists(self) -> None:
        """Raises `InputError` if the directory was removed during the run."""
        if self._lock is not None and not (self.path / ".lock").is_file():
            raise InputError(
                f"--out {self.path} was removed during the run, so the run is lost; start it again"
            )

    def close(self) -> None:
        """Unlocks the directory and removes it if nothing was written."""
        if self._lock is None:
            return
        self._lock.close()
        if self.path.is_dir() and [path.name for path in self.path.iterdir()] == [".lock"]:
            (self.path / ".lock").unlink()
            self.path.rmdir()


def _defaults(settings: Any) -> dict[str, Any]:
    """Returns the default settings."""
    fields = dataclasses.fields(settings)
    return {x.name: x.default for x in fields if x.default is not dataclasses.MISSING}


def json_text(content: Any, ensure_ascii: bool = True) -> str:
    """Returns JSON with null for numbers that are not finite, which JSON does not have."""
    return json.dumps(_plain(content), indent=1, ensure_ascii=ensure_ascii, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value


def joined_processes() -> Any:
    """Returns `kmodels.core.processes` in a run of several processes, else None."""
    module = sys.modules.get("kmodels.core.processes")
    return module if module is not None and module.count() > 1 else None


# Help of an argument that `model_in` reads.
MODEL = "Directory of a run, or a directory, file or address of a model."


def model_in(path: str) -> str:
    """Returns the directory of the model of a run; any other path is returned as it is.

    Raises:
        InputError: for a run that has no model yet.
    """
    folder = local_path(path) if not is_remote(path) else None
    if folder is None or not folder.is_dir():
        return path
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    if (folder / "adapter").is_dir() and (folder / "history.csv").is_file():
        raise InputError(
            f"{path} has an adapter but no merged model; give the base model with --adapter "
            f"{folder / 'adapter'}"
        )
    if (folder / "checkpoints").is_dir():
        raise InputError(f"{path} is an unfinished run; continue it with --resume")
    return path


def run_at(path: str) -> Path | None:
    """Returns the directory of a run of a recipe, None for any other path."""
    folder = local_path(path) if not is_remote(path) else None
    return folder if folder is not None and (folder / "history.csv").is_file() else None


def note_evaluation(folder: Path, data: str, evaluation: dict[str, Any]) -> None:
    """Adds results to evaluations.json of a run, in place of older ones on the same data.

    Args:
        folder: directory of a run.
        data: path of the data.
        evaluation: see `EVALUATED`.
    """
    content = {**_json(folder / EVALUATIONS, EVALUATED), shown(data): evaluation}
    text = json_text(content) + "\n"
    atomic_write(folder / EVALUATIONS, lambda path: path.write_text(text))


def check_preprocessor(model: Any, path: str) -> None:
    """Raises `InputError` for a model of images that was read without a preprocessor."""
    if model.preprocessor is None:
        raise InputError(
            f"{path} has no preprocessor, so the normalization of images is unknown; save the "
            "model with one, or add preprocessor_config.json"
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a run, finished or not; missing files are empty.

    Attributes:
        folder: directory of the run.
        settings: config.json, without the recipe's name.
        result: result.json, or evaluation.json if nothing was trained.
        notes: run.json.
        predictions: predictions.json.
        evaluations: evaluations.json.
        rows: history.csv, with numbers as numbers.
    """

    folder: Path
    settings: dict[str, Any]
    result: dict[str, Any]
    notes: dict[str, Any]
    predictions: dict[str, Any]
    evaluations: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return self._first("recipe") or self.settings.get("recipe") or "run"

    @property
    def model(self) -> str:
        """The name of the architecture, or the source of the weights."""
        return self._first("model", "preset") or self.settings.get("preset") or "run"

    @property
    def backend(self) -> str | None:
        """The backend of Keras."""
        return self._first("backend")

    @property
    def device(self) -> str | None:
        """The name and number of the devices."""
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
        """The final metrics by Keras' log names."""
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
        """The start of its first part, with the time zone of that machine."""
        parts = self.notes.get("parts") or [{}]
        try:
            return datetime.fromisoformat(parts[0].get("started") or "")
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """The duration of all parts in seconds, as far as it is known."""
        known = [part["seconds"] for part in self.notes.get("parts", ()) if part.get("seconds")]
        return sum(known) if known else None

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return bool(self.result)

    @cached_property
    def best(self) -> tuple[str, dict[str, Any]] | None:
        """The metric that compares epochs, and the row of the best epoch."""
        name = self.notes.get("best") or "val_loss"
        values = ((row.get(name), row) for row in self.epochs)
        rows = [row for x, row in values if isinstance(x, float) and math.isfinite(x)]
        if not rows:
            return None
        pick = max if best_of(name) == "max" else min
        return name, pick(rows, key=lambda row: row[name])

    @cached_property
    def use(self) -> list[str]:
        """A command and lines of Python that use the model; empty if there is no model yet."""
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
        values = (file.get(name) for file in (self.notes, self.result) for name in names)
        return next(filter(None, values), None)


def read(folder: str | Path) -> Run:
    """Reads the directory of a run, finished or not; raises `InputError` if it holds none."""
    folder = local_path(folder)
    file = folder / "config.json"
    settings = read_optional(file, {"recipe": str})
    result = _json(folder / "result.json", RESULT) or _json(folder / "evaluation.json", RESULT)
    if not settings and not result:
        raise InputError(f"{folder} holds no run: no config.json; give the directory of a recipe")
    notes = _json(folder / NOTES, NOTED)
    predictions = _json(folder / "predictions.json", PREDICTED)
    _check_predictions(folder / "predictions.json", predictions)
    evaluations = _json(folder / EVALUATIONS, EVALUATED)
    rows = history.read(file) if (file := folder / "history.csv").is_file() else []
    names = dict.fromkeys([*history.COLUMNS, *(name for row in rows for name in row)])
    rows = [{**names, **row} for row in rows]
    return Run(folder, settings, result, notes, predictions, evaluations, rows)


def _check_predictions(path: Path, predictions: dict[str, Any]) -> None:
    """Raises InputError for confusions of classes that the file does not list."""
    if not predictions:
        return
    known = range(len(predictions["classes"]))
    if not known or any(x not in known for row in predictions["confusions"] for x in row[:2]):
        raise InputError(f"{path} has confusions of classes that it does not list; write it again")


def _json(path: Path, shape: Shape) -> dict[str, Any]:
    """Returns the object in a file without null values, {} if there is no file."""
    return _without_nulls(read_optional(path, shape))


def _without_nulls(value: Any) -> Any:
    """Returns a value of JSON whose objects lack the names that are null."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    # A setting may have null as its default.
    return {
        name: one if name == "defaults" else _without_nulls(one)
        for name, one in value.items()
        if one is not None
    }
