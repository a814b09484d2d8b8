"""report.html: one page that shows a run, and the parts that compare.html shares with it."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kmodels.core.files import atomic_write
from kmodels.runs import console
from kmodels.runs.run_folder import Run, read

NAME = "report.html"
# Steps of longer runs are averaged to this number of points.
MOST_POINTS = 1200
# Further quantities of epochs with a chart: title and unit.
OTHERS = {"samples_per_s": ("Throughput", "samples per second, by epoch")}
# The colour of a part of the data in all charts.
COLOURS = {"each step": 0, "training": 0, "validation": 1}
# Columns of history.csv that are not metrics.
NOT_METRICS = (
    *("row", "epoch", "step", "learning_rate", "learnt_tokens_per_s", "seconds"),
    *OTHERS,
)
Points = Mapping[int, float]
# With more classes the page shows the most confused pairs and the hardest classes, not a matrix.
MOST_CLASSES = 12
_SHOWN_PAIRS, _SHOWN_CLASSES = 15, 10
# Longer counts do not fit a cell of 25 pixels.
_LARGEST_COUNT = 999
GROUPS = {
    "all": ("All mistakes", "Predictions and confidences, the highest confidence first."),
    "sure": ("Confident mistakes", "Wrong with high confidence: check these labels first."),
    "unsure": ("Unsure mistakes", "Wrong with low confidence."),
    "narrow": ("Barely right", "Right with the lowest confidences."),
}
_SHOWN_ROWS = 200


def write_page(template: str, path: Path, content: dict[str, Any]) -> Path:
    """Fills a template of runs/page, and writes the page atomically; it needs no other file."""
    # The import takes 50 ms and is only needed at the end of a run.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    page = Environment(
        loader=PackageLoader("kmodels.runs", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = {"time": console.seconds}
    filters = (number, metric, share, date, breakable)
    page.filters |= names | {written.__name__: written for written in filters}
    text = page.get_template(template).render(content)
    return atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def number(value: object) -> str:
    """Formats a value with a thousands separator and four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def metric(value: object) -> str:
    """Formats a loss or a metric with four decimals, as in the terminal."""
    if value is None:
        return "–"
    return f"{value:,.4f}" if isinstance(value, int | float) else str(value)


def breakable(name: str) -> Any:
    """Returns a name with line breaks allowed after underscores, for narrow columns."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def date(value: datetime) -> str:
    """Formats a time: "23 November 2026, 14:46"."""
    return f"{value.day} {value:%B %Y, %H:%M}"


def share(value: float) -> str:
    """Formats a share in percent, with a decimal close to 0 and 1."""
    return f"{100 * value:.0f}%" if 0.01 <= value <= 0.99 or value in (0, 1) else f"{value:.1%}"


def charts_of_run(run: Run) -> list[dict[str, Any]]:
    """Returns the charts of a report: `title`, `text`, steps `x`, and `lines` (label, values)."""
    epochs = run.epochs
    charts = [
        _chart(
            "Loss",
            "by step, and its mean by epoch",
            {
                "each step": _thinned(run.steps, "loss"),
                "training": _points(epochs, "loss"),
                "validation": _points(epochs, "val_loss"),
            },
        )
    ]
    for name in _metrics(epochs):
        parts = {"training": name, "validation": f"val_{name}"}
        lines = {label: _points(epochs, column) for label, column in parts.items()}
        charts.append(_chart(name.capitalize(), "by epoch", lines))
    charts.append(
        _chart("Learning rate", "by step", {"rate": _thinned(run.steps, "learning_rate")})
    )
    for name, (title, text) in OTHERS.items():
        charts.append(_chart(title, text, {"speed": _points(epochs, name)}))
    # A run of one epoch has no curve by epoch.
    return [chart for chart in charts if len(chart["x"]) > 1]


def charts_of_runs(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns charts with a line for each run."""
    metrics = dict.fromkeys(name for run in runs for name in _metrics(run.epochs))
    wanted = [("Training loss", "by step", "loss", True)]
    wanted += [("Validation loss", "by epoch", "val_loss", False)]
    for name in metrics:
        wanted += [(f"Validation {name}", "by epoch", f"val_{name}", False)]
        wanted += [(f"Training {name}", "by epoch", name, False)]
    wanted += [("Learning rate", "by step", "learning_rate", True)]
    wanted += [(title, text, name, False) for name, (title, text) in OTHERS.items()]
    charts = []
    for title, text, column, by_step in wanted:
        lines = {
            label: _thinned(run.steps, column, MOST_POINTS // 3)
            if by_step
            else _points(run.epochs, column)
            for run, label in zip(runs, labels, strict=True)
        }
        # A run keeps its colour in charts without other runs.
        charts.append(_chart(title, text, lines, keep=True))
    return [chart for chart in charts if any(map(_is_curve, chart["lines"]))]


def _chart(
    title: str, text: str, lines: Mapping[str, Points], keep: bool = False
) -> dict[str, Any]:
    lines = {label: points for label, points in lines.items() if points or keep}
    steps = sorted({step for points in lines.values() for step in points})
    return {
        "title": title,
        "text": text,
        "x": steps,
        "lines": [
            {
                "label": label,
                "colour": COLOURS.get(label, number),
                "values": [_short(points.get(step)) for step in steps],
            }
            for number, (label, points) in enumerate(lines.items())
        ],
    }


def _metrics(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name.removeprefix("val_") for row in epochs for name in row if row[name])
    return [name for name in names if name not in ("loss", *NOT_METRICS)]


def _points(rows: Sequence[Mapping[str, Any]], column: str) -> dict[int, float]:
    # JSON has no number that is not finite: with one, no chart of the page would be drawn.
    values = ((int(row["step"]), row.get(column)) for row in rows)
    return {step: x for step, x in values if isinstance(x, float) and math.isfinite(x)}


def _thinned(
    rows: Sequence[Mapping[str, Any]], column: str, most: int = MOST_POINTS
) -> dict[int, float]:
    """Returns means of equal numbers of steps, at most `most` points."""
    points = list(_points(rows, column).items())
    width = -(-len(points) // most) or 1
    parts = (points[start : start + width] for start in range(0, len(points), width))
    return {part[-1][0]: sum(value for _, value in part) / len(part) for part in parts}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _is_curve(line: Mapping[str, Any]) -> bool:
    return sum(value is not None for value in line["values"]) > 1


def confusion(predictions: dict[str, Any]) -> dict[str, Any]:
    """Returns the section of confusions: `matrix` of few classes, `pairs` and `worst` of many."""
    classes = predictions["classes"]
    counts = {(label, said): count for label, said, count in predictions["confusions"]}
    sizes = [sum(counts.get((i, j), 0) for j in range(len(classes))) for i in range(len(classes))]
    few = len(classes) <= MOST_CLASSES
    percent = max(counts.values(), default=0) > _LARGEST_COUNT
    pairs = sorted(
        ((count, pair) for pair, count in counts.items() if pair[0] != pair[1]),
        key=lambda entry: (-entry[0], entry[1]),
    )
    rights = [counts.get((i, i), 0) / size if size else 1.0 for i, size in enumerate(sizes)]
    hardest = sorted(range(len(classes)), key=rights.__getitem__)[:_SHOWN_CLASSES]
    return {
        "classes": classes,
        "percent": percent,
        "tall": max(map(len, classes), default=0) > 2,
        "matrix": [
            (name, [_cell(counts, sizes, classes, i, j, percent) for j in range(len(classes))])
            for i, name in enumerate(classes)
        ]
        if few
        else None,
        "pairs": [
            {"label": classes[i], "said": classes[j], "count": count, "of": sizes[i]}
            for count, (i, j) in pairs[: _SHOWN_PAIRS if not few else 5]
        ],
        "worst": [] if few else [{"name": classes[i], "share": rights[i]} for i in hardest],
    }


def _cell(
    counts: dict[tuple[int, int], int],
    sizes: list[int],
    classes: list[str],
    row: int,
    column: int,
    percent: bool,
) -> dict[str, Any]:
    count = counts.get((row, column), 0)
    part = count / sizes[row] if sizes[row] else 0.0
    kinds = ["strong"] if part > 0.55 else []
    if count and row != column:
        kinds.append("error")
    subject = f"{count} of {sizes[row]} images of {classes[row]} ({share(part)})"
    return {
        "text": "" if not count else f"{100 * part:.0f}" if percent else str(count),
        "share": round(part, 3),
        "kind": " ".join(kinds),
        "title": f"{subject} are predicted as {classes[column]}",
    }


# Facts of result.json: (key, label, how it is written).
SPEED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("samples_per_s", "{unit} per second", number),
    ("learnt_tokens_per_s", "learnt tokens per second", number),
    ("step_ms_median", "median of a step", lambda value: console.seconds(value / 1000)),
    ("compile_s", "additional time of the first step", console.seconds),
    ("peak_memory_mb", "peak memory", lambda value: f"{value:,.0f} MB"),
    ("wait_for_data_share", "of the time waited for data", share),
)


def write(folder: str | Path) -> Path:
    """Writes `folder/report.html` and returns its path; sections without data are left out."""
    run = read(folder)
    return write_page("report.html", run.folder / NAME, _content(run))


def _content(run: Run) -> dict[str, Any]:
    groups = run.predictions.get("groups", {})
    epochs = run.epochs
    names = epochs[0] if epochs else ()
    hidden = {"row", *(name for name in names if all(row[name] is None for row in epochs))}
    source = run.data.get("source")
    return {
        "run": run,
        "title": run.model if not source else f"{run.model} on {source}",
        "summary": _summary(run),
        "tiles": _tiles(run),
        "results": _results(run),
        "samples": run.result.get("samples", []),
        "preferences": run.result.get("preferences", []),
        "evaluations": run.evaluations,
        "ways": run.result.get("probe", {}).get("ways"),
        "map": run.result.get("probe", {}).get("map"),
        "charts": charts_of_run(run),
        "images": [
            {"title": GROUPS[kind][0], "text": GROUPS[kind][1], "images": images}
            for kind, images in groups.items()
            if kind in GROUPS and images
        ],
        "confusion": confusion(run.predictions) if run.predictions else None,
        "facts": _facts(run),
        "columns": [name for name in names if name not in hidden],
        "epochs": epochs[-_SHOWN_ROWS:],
        "left_out": max(0, len(epochs) - _SHOWN_ROWS),
        "best_epoch": None if run.best is None else run.best[1]["epoch"],
        "overrides": run.result.get("overrides", {}),
        "versions": run.result.get("versions", {}),
    }


def _summary(run: Run) -> str:
    """Returns a summary of one or two sentences."""
    sentence = []
    if (began := run.started) is not None:
        sentence.append(f"It ran on {date(began)}")
        if run.seconds is not None:
            sentence.append(f"for {console.seconds(run.seconds)}")
    if run.backend:
        where = f"{run.backend} on {run.device}, {run.precision}"
        sentence.append(("with " if sentence else "It ran with ") + where)
    text = " ".join(sentence) + "." if sentence else ""
    last = run.epochs[-1]["epoch"] if run.epochs else None
    if run.best is not None:
        name, row = run.best
        best = f"its best by {name} was epoch {row['epoch']:.0f}"
        text += f" It trained for {last:.0f} {'epoch' if last == 1 else 'epochs'}"
        text += f"; {best}." if last != 1 else "."
    return text.strip() or "The run has not ended."


def _tiles(run: Run) -> list[tuple[str, str, bool]]:
    """Returns tuples of value, label, and True for the main result."""
    metrics, tiles = run.metrics, []
    main = () if run.best is None else (f"test_{run.best[0][4:]}", run.best[0])
    others = ("test_accuracy", "val_accuracy", "test_loss", "val_loss")
    for name in dict.fromkeys((*main, *others)):
        if metrics.get(name) is not None and len(tiles) < 2:
            tiles.append((metric(metrics[name]), name, not tiles))
    if run.seconds is not None:
        tiles.append((console.seconds(run.seconds), "in total", False))
    unit = run.data.get("unit", "examples")
    for key, label, written in SPEED:
        if (value := run.result.get(key)) is not None:
            tiles.append((written(value), label.format(unit=unit), False))
    return tiles


def _results(run: Run) -> dict[str, Any] | None:
    """Returns losses and metrics before training, at the best epoch and at the end."""
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
    """Returns metrics of an epoch or of the end by part of the data and name."""
    parts: dict[str, dict[str, float]] = {part: {} for part in console.PREFIXES}
    for log, value in row.items():
        # Metrics of a probe are in its table.
        is_metric = log not in NOT_METRICS and "_val_" not in log and "_test_" not in log
        if is_metric and isinstance(value, float):
            part, name = console.part_and_name(log)
            parts[part][name] = value
    return {part: scores for part, scores in parts.items() if scores}


def _facts(run: Run) -> list[tuple[str, str, bool]]:
    """Returns tuples of name, value, and True for code."""
    data, notes, result = run.data, run.notes, run.result
    facts: list[tuple[str, Any, bool]] = []
    unit = data.get("unit", "examples")
    parts = {"train": "for training", "validation": "for validation", "test": "for the test"}
    counts = [f"{data[key]:,} {text}" for key, text in parts.items() if data.get(key)]
    facts.append(("Data", data.get("source"), False))
    facts.append((unit.capitalize(), ", ".join(counts), False))
    if classes := data.get("classes"):
        shown = ", ".join(classes[:40]) + (", …" if len(classes) > 40 else "")
        facts.append(("Classes", f"{len(classes)}: {shown}", False))
    facts.append(("Details", data.get("details"), False))
    whole = result.get("parameters") or notes.get("parameters")
    trained = result.get("trainable_parameters") or notes.get("trainable_parameters")
    if whole:
        share = "" if trained in (None, whole) else f", {trained:,} trained"
        facts.append(("Parameters", f"{whole:,}{share}", False))
    for number, part in enumerate(notes.get("parts", ())):
        name = "Command" if number == 0 else f"Part {number + 1}"
        facts.append((name, part.get("command"), True))
    if steps := result.get("steps") or notes.get("steps"):
        facts.append(("Steps", f"{steps:,} of {run.settings.get('batch_size')} {unit}", False))
    if result.get("skipped_steps"):
        facts.append(("Skipped steps", f"{result['skipped_steps']:,}, not finite", False))
    facts.append(("Folder", str(run.folder), True))
    return [(name, value, code) for name, value, code in facts if value]
