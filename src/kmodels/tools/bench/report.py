"""The report of a benchmark: a table, a JSON file and an image."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kmodels.core.files import atomic_write, local_path
from kmodels.core.units import pluralize
from kmodels.runs import plots

# The colours of the precisions that have rows; colour-blind eyes tell them apart.
_COLOURS = ("#4477aa", "#cc6677", "#ddaa33", "#117733")
_INK = "#333333"


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a run as a table, and below it what was left out or failed.

    Args:
        result: result of `run`.
        console: to print to.
    """
    rows = [row for row in result["rows"] if row["failed"] is None]
    if rows:
        console.print(_table(result, rows))
        console.print(agreement(rows), highlight=False, soft_wrap=True)
    for line in [*paths(rows), *result["left_out"]]:
        console.print(line, highlight=False, soft_wrap=True)
    for row in result["rows"]:
        if row["failed"] is not None:
            console.print(f"failed: {row['failed']}", highlight=False, soft_wrap=True, markup=False)
    if rows and len({row["group"] for row in rows}) > len({row["precision"] for row in rows}):
        console.print("not all rows of a precision were alive at once: see group in the JSON")


def _table(result: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    settings, unit = result["options"], result["unit"]
    size = f"batch {settings['batch_size']}"
    if unit == "tokens":
        size += f" of {settings['sequence_length']} tokens"
    title = f"{result['preset']}, {size}, {settings['optimizer']}, {rows[0]['facts']['device']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    loader = any(row["workers"] is not None for row in rows)
    batches = any(row["largest_batch"] is not None for row in rows)
    table.add_column("backend", no_wrap=True)
    table.add_column("ops", min_width=9)
    numbers = ["workers"] if loader else []
    numbers += [f"{unit}/s", "step ms\n(quartiles)", "compile s", "peak MiB"]
    for heading in (*numbers, *(["largest"] if batches else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    former = None
    for row in rows:
        if row["precision"] != former:
            former = row["precision"]
            table.add_section()
            table.add_row(Text(former, style="bold"))
        cells = [f"{row['backend']} {row['compile']}", row["ops"]]
        cells += ["" if row["workers"] is None else str(row["workers"])] if loader else []
        step = {name: _short(1000 * seconds) for name, seconds in row["step_s"].items()}
        cells += [_short(row["rate"]), f"{step['median']} ({step['low']}–{step['high']})"]
        cells += [f"{row['compile_s']:.1f}", f"{row['peak_memory_mb']:,.0f}"]
        if batches:
            cells.append("" if row["largest_batch"] is None else f"{row['largest_batch']:,}")
        table.add_row(*cells)
    return table


def agreement(rows: list[dict[str, Any]]) -> str:
    """Returns how far the losses of the rows are apart, by precision."""
    largest: dict[str, float] = {}
    for row in rows:
        name = row["precision"]
        largest[name] = max(largest.get(name, 0.0), row["loss_difference"])
    found = ", ".join(f"{name} {value:.0e}" for name, value in largest.items())
    return f"losses agree, the largest relative difference is: {found}"


def _short(number: float) -> str:
    """Gives at least three digits, and no exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.{1 if number >= 10 else 2}f}"


def paths(rows: list[dict[str, Any]]) -> list[str]:
    """Returns where attention took the generic path though its override was wanted, and why."""
    found: dict[str, list[str]] = {}
    for row in rows:
        took = row["took"].get("attention", "override")
        if row["ops"] == "override" and took not in ("override", "not called"):
            why = "there is no override" if took == "generic" else took
            found.setdefault(why, []).append(row["label"])
    return [f"attention is generic in {', '.join(who)}: {why}" for why, who in found.items()]


def write(result: dict[str, Any], out: str | Path) -> list[Path]:
    """Writes the JSON and, beside it, the image; what was there before is replaced whole.

    Args:
        result: result of `run`.
        out: a directory, for bench.json and bench.png, or the path of the JSON file.

    Returns:
        What was written: the image only where a row was measured.
    """
    path = local_path(out)
    path = path if path.suffix == ".json" else path / "bench.json"
    text = json.dumps(result, indent=1) + "\n"
    written = [atomic_write(path, lambda temporary: temporary.write_text(text))]
    if not plots.installed():
        return written
    with plots.as_written([result.get("preset")]):
        if (figure := draw(result)) is not None:
            save = partial(figure.savefig, dpi=120, format="png")
            written.append(atomic_write(path.with_suffix(".png"), save))
    return written


def draw(result: dict[str, Any]) -> Any:
    """Draws speed and memory of each row as bars; matplotlib is imported here.

    Args:
        result: result of `run`, or read from its JSON.

    Returns:
        A figure, or None where no row was measured, or Matplotlib is not installed.
    """
    rows = [row for row in result["rows"] if row["failed"] is None]
    if not rows or not plots.installed():
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.32 * len(rows)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row["precision"] for row in rows))
    items = [row["rate"] * row["step_s"]["median"] for row in rows]
    for place, (row, count) in enumerate(zip(rows, items, strict=True)):
        colour = _COLOURS[names.index(row["precision"])]
        new = row["precision"] not in [other["precision"] for other in rows[:place]]
        label = row["precision"] if new else None
        rate, step = row["rate"], row["step_s"]
        around = [[max(rate - count / step["high"], 0.0)], [max(count / step["low"] - rate, 0.0)]]
        speed.barh(place, rate, color=colour, label=label, xerr=around, ecolor=_INK, capsize=2)
        speed.annotate(
            _short(rate),
            (count / step["low"], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
        )
        memory.barh(place, row["peak_memory_mb"], color=colour)
        memory.annotate(
            f"{row['peak_memory_mb']:,.0f}",
            (row["peak_memory_mb"], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_INK,
        )
    speed.set_yticks(range(len(rows)), [_tick(row) for row in rows], fontsize=8)
    speed.invert_yaxis()
    speed.set_xlabel(f"{result['unit']} per second; whiskers: quartiles of the steps")
    memory.set_xlabel("peak memory of the process, MiB")
    for axis in (speed, memory):
        axis.margins(x=0.14)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=len(names), frameon=False, fontsize=9)
    size = f"batch {result['options']['batch_size']}"
    figure.suptitle(f"{result['preset']}, {size}, {rows[0]['facts']['device']}", x=0.01, ha="left")
    return figure


def _tick(row: dict[str, Any]) -> str:
    loader = [] if row["workers"] is None else [pluralize(row["workers"], "worker")]
    return " · ".join([row["backend"], row["compile"], row["ops"], *loader])
