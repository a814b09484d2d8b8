"""compare.html: results, different settings, curves and answers of several runs on one page."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import InputError, pluralize, printable
from kmodels.core.files import local_path
from kmodels.core.metric_names import best_of
from kmodels.runs import console
from kmodels.runs.report import NOT_METRICS, charts_of_runs, date, metric, number, write_page
from kmodels.runs.run_folder import OF_A_CALL, Run, read

if TYPE_CHECKING:
    from rich.console import Console

NAME = "compare.html"
# Numbers of result.json whose best is not marked, since they do not measure quality.
SPEED = {
    "samples_per_s": "samples per second",
    "learnt_tokens_per_s": "learnt tokens per second",
    "step_ms_median": "ms per step",
    "peak_memory_mb": "peak memory, MB",
    "parameters": "parameters",
    "trainable_parameters": "trained parameters",
    "steps": "steps",
}
# Runs that fit side by side into a terminal of 80 columns.
_TOGETHER = 4

Rows = list[tuple[str, list[dict[str, Any]]]]


class Comparison:
    """A comparison of runs.

    Args:
        folders: directories of runs of recipes, finished or not.

    Raises:
        InputError: for fewer than two folders, a repeated folder, or a folder without a run.
    """

    def __init__(self, folders: Sequence[str | Path]):
        if len(folders) < 2:
            number = pluralize(len(folders), "run")
            raise InputError(f"{number} cannot be compared; give at least 2 directories")
        paths = [local_path(folder).resolve() for folder in folders]
        for path in paths:
            if paths.count(path) > 1:
                raise InputError(f"{console.short(path)} is given twice; give each run once")
        self.runs = [read(folder) for folder in folders]
        self.labels = _labels(paths)

    @property
    def results(self) -> Rows:
        """A row for each loss and metric, with a cell for each run; the best is marked."""
        names = dict.fromkeys(name for run in self.runs for name in _metrics(run))
        held_out = sorted(names, key=lambda name: (_part(name), name.endswith("loss"), name))
        # No best training loss is marked: the smallest may belong to a run that overfits.
        rows = [(x, _scores(x, map(_metrics, self.runs), _part(x) < 2)) for x in held_out]
        for data in dict.fromkeys(data for run in self.runs for data in run.evaluations):
            metrics = [run.evaluations.get(data, {}).get("after", {}) for run in self.runs]
            for name in dict.fromkeys(name for one in metrics for name in one):
                if not name.endswith("_stderr"):
                    rows.append((f"{data} {name}", _scores(name, metrics, True)))
        for name, label in SPEED.items():
            values = [run.result.get(name) for run in self.runs]
            if any(value is not None for value in values):
                rows.append((label, [_cell(number(value)) for value in values]))
        times = [run.seconds for run in self.runs]
        if any(times):
            rows.append(("time", [_cell(console.seconds(x) if x else "–") for x in times]))
        return rows

    @property
    def settings(self) -> Rows:
        """Settings, recipe, backend and device in which the runs differ."""
        settings_of_runs = [
            {"recipe": run.recipe, "backend": run.backend, "device": run.device, **run.settings}
            for run in self.runs
        ]
        names = dict.fromkeys(name for settings in settings_of_runs for name in settings)
        rows = []
        for name in names:
            texts = [number(settings.get(name)) for settings in settings_of_runs]
            if name not in OF_A_CALL and len(set(texts)) > 1:
                rows.append((name, [_cell(text) for text in texts]))
        return rows

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts with the first run's answer before training and every run's answer after it."""
        by_prompt: dict[str, dict[str, Any]] = {}
        for place, (run, label) in enumerate(zip(self.runs, self.labels, strict=True)):
            for sample in run.result.get("samples", ()):
                prompt = by_prompt.setdefault(sample.get("prompt", ""), {"answers": []})
                if not prompt["answers"] and "before" in sample:
                    prompt["answers"].append(("before", sample["before"], None))
                prompt["answers"].append((label, sample.get("after", ""), place))
        return [{"prompt": prompt, **rest} for prompt, rest in by_prompt.items()]

    def write(self, path: str | Path = NAME) -> Path:
        """Writes the page and returns its path."""
        content = {
            "runs": [
                {
                    "label": label,
                    "title": f"{run.recipe}: {run.model} on {run.data.get('source') or 'its data'}",
                    "summary": _summary(run),
                    "folder": str(run.folder),
                }
                for run, label in zip(self.runs, self.labels, strict=True)
            ],
            "results": self.results,
            "best": any(cell["best"] for _, cells in self.results for cell in cells),
            "settings": self.settings,
            "charts": charts_of_runs(self.runs, self.labels),
            "samples": self.samples,
        }
        return write_page("compare.html", local_path(path), content)

    def show(self, terminal: "Console") -> None:
        """Prints results and different settings; runs that do not fit are printed below."""
        from rich.table import Table
        from rich.text import Text

        for start in range(0, len(self.runs), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            for title, rows in (("Results", self.results), ("Settings", self.settings)):
                if not rows:
                    continue
                table = Table(title=title, title_justify="left", box=None, pad_edge=False)
                table.add_column("")
                for label in self.labels[part]:
                    table.add_column(printable(label), justify="right", overflow="fold")
                for name, cells in rows:
                    texts = [
                        Text(printable(x["text"]) + "*" * x["best"], "bold" if x["best"] else "")
                        for x in cells
                    ]
                    table.add_row(printable(name), *texts[part])
                terminal.print(table)
                terminal.print()
        if any(cell["best"] for _, cells in self.results for cell in cells):
            terminal.print("* the best of a row")


def _scores(name: str, metrics: Iterable[dict[str, Any]], marks: bool) -> list[dict[str, Any]]:
    values = [one.get(name) for one in metrics]
    known = [value for value in values if value is not None and math.isfinite(value)]
    way = best_of(name)
    has_best = marks and way is not None and len(set(known)) > 1
    best = (max if way == "max" else min)(known) if has_best else None
    return [_cell(metric(value), has_best and value == best) for value in values]


def _metrics(run: Run) -> dict[str, Any]:
    """Returns the final metrics and the best value of the metric that compares epochs."""
    last = run.epochs[-1] if run.epochs else {}
    names = [n for n in last if n not in NOT_METRICS and isinstance(last[n], float)]
    metrics = {name: last[name] for name in names} | {
        name: value for name, value in run.metrics.items() if isinstance(value, int | float)
    }
    if run.best is not None:
        name, row = run.best
        metrics[f"best {name}"] = row[name]
    return metrics


def _part(name: str) -> int:
    return next((i for i, part in enumerate(("test_", "val_")) if part in name), 2)


def _cell(text: str, best: bool = False) -> dict[str, Any]:
    return {"text": text, "best": best}


def _summary(run: Run) -> str:
    began = "" if run.started is None else date(run.started)
    state = "" if run.finished else "not finished"
    return ", ".join(filter(None, (began, f"{run.backend} on {run.device}", state)))


def _labels(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of paths that differ."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == len(labels):
            break
    return labels
