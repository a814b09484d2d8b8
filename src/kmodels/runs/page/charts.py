"""Curves for a page: one chart for each quantity, with a line for each run and part of the data."""

from collections.abc import Mapping, Sequence
from typing import Any

from kmodels.runs.page.run import Run

# Steps of longer runs are averaged until there are so many points.
MOST_POINTS = 1200
# Quantities of epochs that have a chart of their own, with its unit.
OTHERS = {"samples_per_s": ("Throughput", "samples per second, by epoch")}
# A part of the data has one colour in all charts.
COLOURS = {"each step": 0, "training": 0, "validation": 1}
# Columns of history.csv that are no result of the model.
NOT_METRICS = ("row", "epoch", "step", "learning_rate", "seconds", *OTHERS)

Points = Mapping[int, float]


def of_run(run: Run) -> list[dict[str, Any]]:
    """Returns the charts of a report.

    Args:
        run: as `read` gives it.

    Returns:
        By chart its title, what it shows, the steps `x`, and `lines` with a label and values.
    """
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


def of_runs(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Returns charts with a line for each run.

    Args:
        runs: to compare.
        labels: of the runs.
    """
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
        # A run keeps its colour where another one has no line.
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
    return {int(row["step"]): row[column] for row in rows if isinstance(row.get(column), float)}


def _thinned(
    rows: Sequence[Mapping[str, Any]], column: str, most: int = MOST_POINTS
) -> dict[int, float]:
    """Returns the mean of as many steps as give no more than `most` points."""
    points = list(_points(rows, column).items())
    width = -(-len(points) // most) or 1
    parts = (points[start : start + width] for start in range(0, len(points), width))
    return {part[-1][0]: sum(value for _, value in part) / len(part) for part in parts}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _is_curve(line: Mapping[str, Any]) -> bool:
    return sum(value is not None for value in line["values"]) > 1
