"""report.html: a run for a person who was not there, on one page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kmodels.runs import console
from kmodels.runs.page import charts, render
from kmodels.runs.page.confusion import confusion
from kmodels.runs.page.run import Run, read

NAME = "report.html"
# Facts of result.json: (key, label, how it is written).
SPEED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("samples_per_s", "{unit} per second", render.number),
    ("step_ms_median", "median of a step", lambda value: console.seconds(value / 1000)),
    ("compile_s", "more for the first step", console.seconds),
    ("peak_memory_mb", "peak memory", lambda value: f"{value:,.0f} MB"),
    ("wait_for_data_share", "of the time waited for data", render.share),
)
GROUPS = {
    "all": ("All mistakes", "What the model says and how sure it is, the surest first."),
    "sure": ("Sure mistakes", "Wrong, and the model was sure: look at these labels first."),
    "unsure": ("Unsure mistakes", "Wrong, but the model hardly preferred its answer."),
    "narrow": ("Right, but only just", "The right answers that the model was least sure of."),
}
_SHOWN_ROWS = 200


def write(folder: str | Path) -> Path:
    """Writes `folder/report.html`, which needs no other file and no network to be looked at.

    Args:
        folder: of a run of a recipe, finished or not. The page leaves out what the folder lacks.

    Returns:
        The file, replaced as a whole.

    Raises:
        InputError: where the folder holds no run.
    """
    run = read(folder)
    return render.write("report.html", run.folder / NAME, _content(run))


def _content(run: Run) -> dict[str, Any]:
    groups = run.predictions.get("groups", {})
    epochs = run.epochs
    hidden = ("row", *(name for name in (epochs[0] if epochs else ()) if not _any(epochs, name)))
    source = run.data.get("source")
    return {
        "run": run,
        "title": run.model if not source else f"{run.model} on {source}",
        "summary": _summary(run),
        "tiles": _tiles(run),
        "results": _results(run),
        "samples": run.result.get("samples", []),
        "ways": run.result.get("probe", {}).get("ways"),
        "map": run.result.get("probe", {}).get("map"),
        "charts": charts.of_run(run),
        "images": [
            {"title": GROUPS[kind][0], "text": GROUPS[kind][1], "images": images}
            for kind, images in groups.items()
            if kind in GROUPS and images
        ],
        "confusion": confusion(run.predictions) if run.predictions else None,
        "facts": _facts(run),
        "columns": [name for name in epochs[0] if name not in hidden] if epochs else [],
        "epochs": epochs[-_SHOWN_ROWS:],
        "left_out": max(0, len(epochs) - _SHOWN_ROWS),
        "best_epoch": None if run.best is None else run.best[1]["epoch"],
        "overrides": run.result.get("overrides", {}),
        "versions": run.result.get("versions", {}),
    }


def _summary(run: Run) -> str:
    """Says in a sentence or two what came out."""
    said = []
    if (began := run.started) is not None:
        said.append(f"It ran on {render.date(began)}")
        if run.seconds is not None:
            said.append(f"for {console.seconds(run.seconds)}")
    if run.backend:
        where = f"{run.backend} on {run.device}, {run.precision}"
        said.append(("with " if said else "It ran with ") + where)
    text = " ".join(said) + "." if said else ""
    last = run.epochs[-1]["epoch"] if run.epochs else None
    if run.best is not None:
        name, row = run.best
        best = f"its best by {name} was epoch {row['epoch']:.0f}"
        text += f" It trained for {last:.0f} {'epoch' if last == 1 else 'epochs'}"
        text += f"; {best}." if last != 1 else "."
    return text.strip() or "The run has not come to its end."


def _tiles(run: Run) -> list[tuple[str, str, bool]]:
    """Returns value, label and whether it is what the run was about."""
    metrics, found = run.metrics, []
    chosen = () if run.best is None else (f"test_{run.best[0][4:]}", run.best[0])
    others = ("test_accuracy", "val_accuracy", "test_loss", "val_loss")
    for name in dict.fromkeys((*chosen, *others)):
        if metrics.get(name) is not None and len(found) < 2:
            found.append((render.metric(metrics[name]), name, not found))
    if run.seconds is not None:
        found.append((console.seconds(run.seconds), "in all", False))
    unit = run.data.get("unit", "examples")
    for key, label, written in SPEED:
        if (value := run.result.get(key)) is not None:
            found.append((written(value), label.format(unit=unit), False))
    return found


def _results(run: Run) -> dict[str, Any] | None:
    """Returns losses and metrics by part of the data: before, at the best epoch and at the end."""
    groups: list[tuple[str, dict[str, dict[str, Any]]]] = []
    if "before" in run.result:
        scores = {k: v for k, v in run.result["before"].items() if k != "answers"}
        groups.append(("Before the training", {"validation": scores}))
    mark = None
    if run.best is not None and run.best[1] != run.epochs[-1]:
        name, row = run.best
        heading = f"Best epoch: {row['epoch']:.0f}"
        mark = (heading, "validation", name.removeprefix("val_"))
        groups.append((heading, by_part(row)))
    if run.epochs:
        last = run.epochs[-1]
        heading = f"Last epoch: {last['epoch']:.0f}"
        groups.append((heading, by_part({**last, **run.metrics})))
    elif run.metrics:
        groups.append(("Evaluation", by_part(run.metrics)))
    scores = [row for _, rows in groups for row in rows.values()]
    columns = sorted(
        {name for row in scores for name in row}, key=lambda name: (name != "loss", name)
    )
    return {"columns": columns, "groups": groups, "mark": mark} if columns else None


def by_part(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the numbers of a row of an epoch, or of metrics, by part of the data and name."""
    parts: dict[str, dict[str, float]] = {part: {} for part in console.PREFIXES}
    for log, value in row.items():
        # Those of a probe are in its table.
        told = log not in charts.NOT_METRICS and "_val_" not in log and "_test_" not in log
        if told and isinstance(value, float):
            part, name = console.part_and_name(log)
            parts[part][name] = value
    return {part: scores for part, scores in parts.items() if scores}


def _facts(run: Run) -> list[tuple[str, str, bool]]:
    """Returns name, value, and whether it is to be typed."""
    data, notes, result = run.data, run.notes, run.result
    found: list[tuple[str, Any, bool]] = []
    unit = data.get("unit", "examples")
    parts = {"train": "to train on", "validation": "for validation", "test": "for the test"}
    counts = [f"{data[key]:,} {text}" for key, text in parts.items() if data.get(key)]
    found.append(("Data", data.get("source"), False))
    found.append((unit.capitalize(), ", ".join(counts), False))
    if classes := data.get("classes"):
        shown = ", ".join(classes[:40]) + (", …" if len(classes) > 40 else "")
        found.append(("Classes", f"{len(classes)}: {shown}", False))
    found.append(("Details", data.get("details"), False))
    whole = result.get("parameters") or notes.get("parameters")
    trained = result.get("trainable_parameters") or notes.get("trainable_parameters")
    if whole:
        share = "" if trained in (None, whole) else f", {trained:,} of them trained"
        found.append(("Parameters", f"{whole:,}{share}", False))
    for number, part in enumerate(notes.get("parts", ())):
        name = "Command" if number == 0 else f"Part {number + 1}"
        found.append((name, part.get("command"), True))
    if steps := result.get("steps") or notes.get("steps"):
        found.append(("Steps", f"{steps:,} of {run.settings.get('batch_size')} {unit}", False))
    if result.get("skipped_steps"):
        found.append(("Skipped steps", f"{result['skipped_steps']:,}, not finite", False))
    found.append(("Folder", str(run.folder), True))
    return [(name, value, code) for name, value, code in found if value]


def _any(rows: list[dict[str, Any]], name: str) -> bool:
    return any(row.get(name) is not None for row in rows)
