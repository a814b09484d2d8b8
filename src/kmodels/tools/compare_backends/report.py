"""The reports of `kmodels bench` and `kmodels parity`: tables, a JSON file and a figure."""

from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kmodels.core.errors import pluralize
from kmodels.core.files import atomic_write, local_path
from kmodels.runs import plots
from kmodels.runs.run_folder import json_text

# Colours of the precisions, distinguishable with colour blindness.
_COLOURS = ("#4477aa", "#cc6677", "#ddaa33", "#117733")
_INK = "#333333"
_PLAIN: Any = {"highlight": False, "soft_wrap": True, "markup": False}


__all__ = ["draw", "show", "write"]


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a benchmark or a comparison as a table, followed by failures or the first difference.

    Args:
        result: result of `bench.run`, `parity.run` or `op_parity.run`.
        console: the console to print to.
    """
    kinds = {
        "kmodels bench": _show_bench,
        "kmodels parity": _show_parity,
        "kmodels op parity": _show_op_parity,
    }
    kinds[result["kind"]](result, console)


def _show_bench(result: dict[str, Any], console: Console) -> None:
    rows = [row for row in result["rows"] if row["failed"] is None]
    if rows:
        console.print(_table(result, rows))
        console.print(_agreement(rows), **_PLAIN)
    failed = [f"failed: {x['failed']}" for x in result["rows"] if x["failed"] is not None]
    for line in [*_paths(rows), *result["left_out"], *failed]:
        console.print(line, **_PLAIN)
    if rows and len({row["group"] for row in rows}) > len({row["precision"] for row in rows}):
        console.print(
            "not all rows of a precision ran in turns with each other: see group in the JSON"
        )


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


def _agreement(rows: list[dict[str, Any]]) -> str:
    largest: dict[str, float] = {}
    for row in rows:
        name = row["precision"]
        largest[name] = max(largest.get(name, 0.0), row["loss_difference"])
    parts = ", ".join(f"{name} {value:.0e}" for name, value in largest.items())
    return f"losses agree; largest relative difference: {parts}"


def _short(number: float) -> str:
    """Formats a number with at least three digits and without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.{1 if number >= 10 else 2}f}"


def _paths(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rows whose attention declined its override, by reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        took = row["took"].get("attention", "override")
        if row["ops"] == "override" and took not in ("override", "not called"):
            why = "there is no override" if took == "generic" else took
            by_reason.setdefault(why, []).append(row["label"])
    return [f"attention is generic in {', '.join(who)}: {why}" for why, who in by_reason.items()]


def write(result: dict[str, Any], out: str | Path) -> list[Path]:
    """Writes the JSON file of a benchmark and its figure; existing files are replaced atomically.

    Args:
        result: result of `bench.run`.
        out: a directory, for bench.json and bench.png, or the path of the JSON file.

    Returns:
        The written paths; a figure is only drawn if a row was measured.
    """
    path = local_path(out)
    path = path if path.suffix == ".json" else path / "bench.json"
    text = json_text(result) + "\n"
    written = [atomic_write(path, lambda temporary: temporary.write_text(text))]
    if not plots.installed():
        return written
    with plots.as_written([result.get("preset")]):
        if (figure := draw(result)) is not None:
            save = partial(figure.savefig, dpi=120, format="png")
            written.append(atomic_write(path.with_suffix(".png"), save))
    return written


def draw(result: dict[str, Any]) -> Any:
    """Draws speed and memory of each row as bars.

    Args:
        result: result of `bench.run`, or read from its JSON.

    Returns:
        A figure, or None if no row was measured or Matplotlib is not installed.
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
        peak = row["peak_memory_mb"]
        memory.barh(place, peak, color=colour)
        for axis, text, end in (
            (speed, _short(rate), count / step["low"]),
            (memory, f"{peak:,.0f}", peak),
        ):
            beside: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(text, (end, place), **beside, fontsize=8, color=_INK)
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


def _show_parity(result: dict[str, Any], console: Console) -> None:
    left, right = result["sides"]
    table = Table(title=f"kmodels parity: {left} and {right}", title_justify="left")
    for heading in ("step", "stage", "tensors", "largest difference"):
        table.add_column(heading, justify="right" if heading in ("step", "tensors") else "left")
    table.add_column("over allowed", justify="right")
    former = 1
    for stage in result["stages"]:
        if stage["step"] != former:
            table.add_section()
            former = stage["step"]
        cells = [str(stage["step"]), stage["stage"], str(stage["count"]), stage["worst"]]
        table.add_row(*cells, f"{stage['apart']:.3g}")
    console.print(table)
    lines = []
    if result["dropout"]:
        lines.append("the model has dropout, so only the forward pass without dropout is compared")
    if (first := result["first"]) is None:
        lines.append(f"equal in {result['steps']} steps, to {result['tolerance']:g}")
    else:
        lines.append(f"first difference: step {first['step']}, {first['stage']}, {first['text']}")
        lines += [f"already different before that step: {line}" for line in first["weights"]]
    for line in lines:
        console.print(line, **_PLAIN)


def _show_op_parity(result: dict[str, Any], console: Console) -> None:
    table = Table(title="differences over the tolerance", title_justify="left")
    for heading in ("op", "case", "dtype", "body"):
        table.add_column(heading)
    for heading in ("value", "gradients"):
        table.add_column(heading, justify="right")
    notes: dict[str, int] = {}
    for row in result["rows"]:
        note = row["error"] or row["declined"]
        number = f" ({notes.setdefault(note, len(notes) + 1)})" if note else ""
        cells = ["" if row[key] is None else f"{row[key]:.2g}" for key in ("value", "gradients")]
        body = "declined" if row["declined"] else row["body"]
        table.add_row(row["op"], row["case"], row["dtype"], body + number, *cells)
    console.print(table)
    for note, number in notes.items():
        console.print(f"({number}) {note}", **_PLAIN)
    ran = [row for row in result["rows"] if row["declined"] is None]
    wrong = sum(row["error"] is not None for row in ran)
    counts = f"{len(ran)} of {len(result['rows'])} calls ran on {result['backend']}"
    verdict = f"{wrong} of them failed" if wrong else "values and gradients within the tolerance"
    console.print(f"{counts}; {verdict if ran else 'the rest was declined'}", **_PLAIN)
