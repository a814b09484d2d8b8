"""Reads the files of a run's folder and fills page.html with them."""

import base64
import csv
import json
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_write, local_path

NAME = "report.html"
# Pictures that recipes draw, in the order of the page: (file, heading, what it shows).
PICTURES = (
    ("curves.png", "Curves", "Loss by step, and loss and accuracy by epoch."),
    ("probe.png", "Probe", "Accuracy by way of using the features, and where each class lies."),
    ("predictions.png", "Predictions", "Held-out pictures and what the model says of them."),
    ("confusion.png", "Confusions", "How often each class is taken for each other."),
)
# Facts of result.json: (key, label, unit).
SPEED = (
    ("samples_per_s", "examples", "per s"),
    ("step_ms_median", "step, median", "ms"),
    ("compile_s", "first step beyond a usual one", "s"),
    ("peak_memory_mb", "peak memory", "MB"),
    ("wait_for_data_share", "waited for data", "%"),
)
_SHOWN_ROWS = 50


def write(folder: str | Path) -> Path:
    """Writes `folder/report.html`, which needs no other file and no network to be looked at.

    Args:
        folder: of a run of a recipe, finished or not. The page leaves out what the folder lacks.

    Returns:
        The file, replaced as a whole.

    Raises:
        InputError: where the folder holds no run.
    """
    # Takes 50 ms, and only runs that end need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folder = local_path(folder)
    page = Environment(
        loader=PackageLoader("kmodels.runs", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters["number"] = number
    text = page.get_template("report.html").render(_content(folder))
    return atomic_write(folder / NAME, lambda path: path.write_text(text, encoding="utf-8"))


def number(value: object) -> str:
    """Returns a value as people read it: thousands apart, four digits of a fraction."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _content(folder: Path) -> dict[str, Any]:
    settings = _json(folder / "config.json")
    result = _json(folder / "result.json") or _json(folder / "evaluation.json")
    if not settings and not result:
        raise InputError(f"{folder} holds no run: no config.json; give the directory of a recipe")
    recipe = result.get("recipe") or settings.get("recipe", "run")
    epochs = _epochs(folder / "history.csv")
    share = result.get("wait_for_data_share")
    facts = {**result, "wait_for_data_share": None if share is None else 100 * share}
    return {
        "recipe": recipe,
        "result": result,
        "metrics": result.get("metrics", {}),
        "speed": [(label, facts[key], unit) for key, label, unit in SPEED if key in facts],
        "overrides": result.get("overrides", {}),
        "versions": result.get("versions", {}),
        "settings": {k: v for k, v in settings.items() if k != "recipe"},
        "samples": result.get("samples", []),
        "columns": [name for name in epochs[0] if any(row[name] for row in epochs)]
        if epochs
        else [],
        "epochs": epochs[-_SHOWN_ROWS:],
        "left_out": max(0, len(epochs) - _SHOWN_ROWS),
        "pictures": [
            (heading, caption, base64.b64encode((folder / name).read_bytes()).decode())
            for name, heading, caption in PICTURES
            if (folder / name).is_file()
        ],
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _epochs(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of the epochs, numbers as such; without the column that calls them so."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("row") == "epoch"]
    return [{name: _value(text) for name, text in row.items()} for row in rows]


def _value(text: str | None) -> Any:
    try:
        return float(text or "")
    except ValueError:
        return text
