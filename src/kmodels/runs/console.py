"""Prints what a run says, wrapped at words, and what it is busy with while it is silent."""

import shutil
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from kmodels.core.shown import shown

# Longer lines are hard to read, whatever the width of the terminal.
MOST_COLUMNS = 100
# Parts of the data, in the order in which they are shown, and how Keras' logs of them begin.
PREFIXES = {"training": "", "validation": "val_", "test": "test_"}
# What takes less time is not worth a line.
SILENT_SECONDS = 1.0

# The work under way; there is one terminal, so there is one of these.
_working: "_Working | None" = None


def width() -> int:
    """Returns the columns that a line may take: those of the terminal, or of COLUMNS, else 80."""
    return min(shutil.get_terminal_size((80, 24)).columns, MOST_COLUMNS)


def wrapped(text: str, indent: int = 0, *, fold: bool = False) -> str:
    """Returns a text in lines that fit the terminal, without the passwords of addresses.

    Args:
        text: of any number of lines.
        indent: spaces in front of what is left over of a line.
        fold: cuts words that are longer than a line, and counts wide letters as two columns, as
            texts of a model need it. Else words stay whole, as paths have to.
    """
    # One column stays free: some terminals break a line that fills the last one.
    columns = max(width() - 1 - indent, 10)
    between = "\n" + " " * indent
    lines = (
        _folded(line, columns) if fold else _lines(line, columns)
        for line in shown(text).split("\n")
    )
    return "\n".join(between.join(parts) for parts in lines)


def _lines(text: str, columns: int) -> list[str]:
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False) or [""]


def _folded(text: str, columns: int) -> list[str]:
    from rich.console import Console
    from rich.text import Text

    return [
        line.plain.rstrip()
        for line in Text(text).wrap(Console(markup=False, emoji=False), columns, overflow="fold")
    ]


def say(text: str, indent: int = 2) -> None:
    """Prints a line, wrapped at words, above what is shown as under way.

    Args:
        text: the line.
        indent: spaces in front of its second and later lines.
    """
    print(wrapped(text, indent), flush=True)


def say_facts(title: str, facts: Mapping[str, str], *, fold: bool = False) -> None:
    """Prints a title and under it names with values, the values below each other.

    Args:
        title: the first line.
        facts: values by name; empty ones are left out.
        fold: as in `wrapped`.
    """
    shown = {name: value for name, value in facts.items() if value}
    column = max(map(len, shown), default=0) + 4
    lines = [wrapped(title, 2, fold=fold)]
    lines += [
        f"  {name}".ljust(column) + wrapped(value, column, fold=fold)
        for name, value in shown.items()
    ]
    print("\n".join(lines), flush=True)


def say_metrics(metrics: Mapping[str, float]) -> None:
    """Prints losses and metrics, one row for each part of the data.

    Args:
        metrics: Keras' log names, "val_" or "test_" in front of those of held-out data.
    """
    rows: dict[str, list[str]] = {part: [] for part in PREFIXES}
    for log, value in metrics.items():
        part, name = part_and_name(log)
        rows[part].append(f"{name} {value:.4f}")
    say_facts("\nresult", {part: "  ".join(texts) for part, texts in rows.items()})


def part_and_name(log: str) -> tuple[str, str]:
    """Returns the part of the data that a log of Keras is about, and the log's name without it."""
    part = next(
        (part for part, prefix in PREFIXES.items() if prefix and log.startswith(prefix)), ""
    )
    return (part, log.removeprefix(PREFIXES[part])) if part else ("training", log)


def working(text: str | None) -> None:
    """Tells what the run does from here on, until the next call; None says that it is done.

    A terminal shows the text with a clock beside it while the work lasts. Work of more than a
    second leaves a line behind; elsewhere than on a terminal that line is printed meanwhile.

    Args:
        text: such as "reading the weights".
    """
    global _working
    if _working is not None:
        _working.end()
    _working = None if text is None else _Working(text)


def short(path: str | Path) -> str:
    """Returns a path as it is seen from the working directory, where that is shorter."""
    path = Path(path)
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)


def seconds(value: float) -> str:
    """Returns a time as people say it: "27 ms", "8.1 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(value)
    if value < 1:
        return f"{1000 * value:.1f} ms" if value < 0.01 else f"{1000 * value:.0f} ms"
    if whole < 60:
        return f"{value:.1f} s" if value < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class _Working:
    def __init__(self, text: str):
        self.text, self.begun = shown(text), perf_counter()
        self._bar: Any = None
        self._later: threading.Timer | None = None
        if sys.stdout.isatty():
            self._show()
        else:
            self._later = threading.Timer(SILENT_SECONDS, say, (text,))
            self._later.daemon = True
            self._later.start()

    def end(self) -> None:
        took = perf_counter() - self.begun
        if self._later is not None:
            self._later.cancel()
        if self._bar is not None:
            self._bar.stop()
            if took > SILENT_SECONDS:
                say(f"{self.text}: {seconds(took)}")

    def _show(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # It disappears when the work is done.
        text = TextColumn("{task.description}", markup=False)
        self._bar = Progress(SpinnerColumn(), text, TimeElapsedColumn(), transient=True)
        room = max(width() - 12, 20)
        self._bar.add_task(textwrap.shorten(self.text, room, placeholder=" …"), total=None)
        self._bar.start()
