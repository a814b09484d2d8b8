"""The output of a run: lines wrapped at words, the current work, and the progress of training."""

import math
import shutil
import statistics
import sys
import textwrap
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import pluralize, shown

if TYPE_CHECKING:
    import keras
    from rich.console import Console

    from kmodels.runs.run_folder import Folder

# Longer lines are hard to read, even on a wide terminal.
MOST_COLUMNS = 100
# Parts of the data in the order of tables, and the prefix of their logs in Keras.
PREFIXES = {"training": "", "validation": "val_", "test": "test_"}
# Shorter work prints no line.
SILENT_SECONDS = 1.0

# Without a bar a line is printed after this many seconds without one.
QUIET_SECONDS = 30.0
# Columns of a number, or more for a longer name.
_NUMBER = 7
_NONE = "", "", ""

# The current work; there is one terminal.
_working: "_Working | None" = None


def width() -> int:
    """Returns the columns of a line: those of the terminal, or of COLUMNS, else 80."""
    return min(shutil.get_terminal_size((80, 24)).columns, MOST_COLUMNS)


def plain(**options: Any) -> "Console":
    """Returns a console of rich that interprets no markup: names and texts are anybody's."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


def wrapped(text: str, indent: int = 0, *, fold: bool = False) -> str:
    """Returns a text in lines that fit the terminal, without the passwords of addresses.

    `fold` breaks words that are longer than a line and counts wide letters as two columns, for
    texts of a model; otherwise words such as paths stay whole. Lines are continued after `indent`
    spaces.
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
    from rich.text import Text

    lines = Text(text).wrap(plain(), columns, overflow="fold")
    return [line.plain.rstrip() for line in lines]


def say(text: str, indent: int = 2) -> None:
    """Prints a line, wrapped at words, above the current work.

    Args:
        text: the line.
        indent: spaces in front of its second and later lines.
    """
    print(wrapped(text, indent), flush=True)


def say_facts(title: str, facts: Mapping[str, str], *, fold: bool = False) -> None:
    """Prints a title and below it a table of names and values.

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
        metrics: values by Keras' log names, with the prefix "val_" or "test_" for held-out data.
    """
    rows: dict[str, list[str]] = {part: [] for part in PREFIXES}
    for log, value in metrics.items():
        part, name = part_and_name(log)
        rows[part].append(f"{name} {value:.4f}")
    say_facts("\nresult", {part: "  ".join(texts) for part, texts in rows.items()})


def part_and_name(log: str) -> tuple[str, str]:
    """Returns the part of the data of a log of Keras, and the log's name without its prefix."""
    part = next(
        (part for part, prefix in PREFIXES.items() if prefix and log.startswith(prefix)), ""
    )
    return (part, log.removeprefix(PREFIXES[part])) if part else ("training", log)


def working(text: str | None) -> None:
    """Shows the current work until the next call; None ends it.

    A terminal shows the text with a clock. Work of more than a second leaves a line behind; without
    a terminal that line is printed after a second.

    Args:
        text: such as "reading the weights".
    """
    global _working
    if _working is not None:
        _working.end()
    _working = None if text is None else _Working(text)


def short(path: str | Path) -> str:
    """Returns a path relative to the working directory if it is inside it."""
    path = Path(path)
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)


def seconds(value: float) -> str:
    """Formats a time: "27 ms", "8.1 s", "3 min 20 s", "2 h 5 min"."""
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


def introduce(
    folder: "Folder",
    model: "keras.Model",
    data: Mapping[str, Any],
    *,
    steps: int = 0,
    steps_per_epoch: int = 0,
    best: str | None = None,
) -> None:
    """Prints model, data, training and device of a run, and writes them to run.json.

    Args:
        folder: directory of the run.
        model: the model that will be trained.
        data: `source`, `unit` ("images"), the counts `train`, `validation` and `test`, and if they
            apply `classes` (names) and `details` (a sentence).
        steps: steps of the whole run, none of which are made with --evaluate.
        steps_per_epoch: steps of an epoch.
        best: metric that chooses the best epoch.
    """
    import keras

    from kmodels.core.runtime import device_name

    settings = folder.settings
    steps = 0 if getattr(settings, "evaluate", False) else steps
    weights = getattr(settings, "weights", None)
    name = settings.preset if weights is None else short(weights)
    facts = {
        "model": name,
        "parameters": model.count_params(),
        "trainable_parameters": sum(math.prod(x.shape) for x in model.trainable_weights),
        "data": dict(data),
        "backend": keras.backend.backend(),
        "device": device_name(),
        "precision": getattr(model, "backbone", model).dtype_policy.name,
        "steps": steps,
        "best": best,
    }
    folder.note(**facts)
    working(None)
    say_facts(
        f"{folder.recipe}: {name}, {_parameters(facts)}",
        {
            "data": _data(data),
            "training": _training(steps, steps_per_epoch, settings, data["unit"]),
            "device": f"{facts['backend']} on {facts['device']}, {facts['precision']}",
            "results": short(folder.path),
        },
    )


def _parameters(facts: Mapping[str, Any]) -> str:
    whole, trained = facts["parameters"], facts["trainable_parameters"]
    share = "" if trained == whole else f", {trained:,} trained ({trained / whole:.1%})"
    return f"{whole:,} parameters{share}"


def _data(data: Mapping[str, Any]) -> str:
    classes = f", {len(data['classes'])} classes" if data.get("classes") else ""
    held_out = [f", {part} {data[part]:,}" for part in ("validation", "test") if data.get(part)]
    text = f"{data['source']}{classes}: {data['train']:,} {data['unit']}{''.join(held_out)}"
    return text + (f"; {data['details']}" if data.get("details") else "")


def _training(steps: int, steps_per_epoch: int, settings: Any, unit: str) -> str:
    if not steps:
        return ""
    epochs = math.ceil(steps / steps_per_epoch)
    whole = f"{pluralize(epochs, 'epoch')} of {pluralize(steps_per_epoch, 'step')}"
    if steps % steps_per_epoch:
        whole = f"{pluralize(steps, 'step')}, an epoch has {steps_per_epoch:,}"
    return f"{whole}, {settings.batch_size} {unit} per step"


class Progress:
    """Shows losses, metrics, speed and the time left: a row per epoch, and a bar on a terminal.

    `total` and `epochs` are those of the whole run, `done` are its steps before a resume.
    """

    def __init__(self, total: int, done: int = 0, epochs: int = 1):
        self.total, self.done, self.epochs = total, done, epochs
        self._bar: Any = None
        self._task: Any = None
        self._head = ("", "")
        self._said = perf_counter()

    def start(self) -> None:
        """Shows the bar if there is a terminal."""
        self._said = perf_counter()
        if not sys.stdout.isatty():
            working("running the first step")
            return
        working(None)
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        whole = Column(no_wrap=True)
        self._bar = Bar(
            TextColumn("{task.description}", table_column=whole),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.completed}/{task.total}", table_column=whole),
            TextColumn("{task.fields[loss]}", table_column=whole),
            TimeRemainingColumn(table_column=whole),
            expand=True,
            transient=True,
        )
        self._task = self._bar.add_task(
            "running the first step", total=self.total, completed=self.done, loss=""
        )
        self._bar.start()

    def doing(self, text: str) -> None:
        """Sets the text of the bar, such as "validation"."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def update(self, step: int, loss: float, seconds_left: float) -> None:
        """Moves the bar, or prints a line with the seconds left if there was none for a while."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"loss {loss:.4f}")
            return
        working(None)
        if perf_counter() - self._said > QUIET_SECONDS:
            left = timedelta(seconds=round(seconds_left))
            self.say(f"step {step:,} of {self.total:,}  loss {loss:.4f}  {left} left")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._said = perf_counter()
        say(text)

    def epoch(
        self, epoch: int, logs: Mapping[str, float], speed: float | None, seconds_left: float
    ) -> None:
        """Prints the row of an epoch, and a header if the columns are new.

        Epochs are counted from 1, and `speed` is in samples per second, None if unknown.
        """
        self._said = perf_counter()
        number = f"{epoch}/{self.epochs}"
        trained = [name for name in logs if not name.startswith("val_")]
        trained.sort(key="loss".__ne__)
        held_out = [f"val_{name}" for name in trained if f"val_{name}" in logs]
        held_out += [name for name in logs if name.startswith("val_") and name not in held_out]
        left = str(timedelta(seconds=round(seconds_left)))
        parts = [
            ("", [("epoch", number, max(5, 2 * len(str(self.epochs)) + 1))]),
            ("training", [_column(name, logs[name]) for name in trained]),
            ("validation", [_column(name.removeprefix("val_"), logs[name]) for name in held_out]),
            ("", [("samples/s", "" if speed is None else f"{speed:,.0f}", 9)]),
            ("", [("left", left, 7)]),
        ]
        # On a narrow terminal the speed is left out.
        groups, names, row = next(
            filter(_fits, map(_table_lines, (parts, parts[:3] + parts[4:]))), _NONE
        )
        if not row:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
            say(f"epoch {number}  {numbers}  {left} left")
            return
        if self._head != (groups, names):
            self._head = groups, names
            print(f"\n{groups}\n{names}")
        print(row, flush=True)

    def estimate(self, steps: int, left: float, speed: "Speed") -> None:
        """Prints the expected duration of a run of more than a second."""
        if steps and left > SILENT_SECONDS:
            first = seconds(speed.first)
            each = seconds(speed.step_ms / 1000)
            self.say(
                f"about {seconds(left)} left ({pluralize(steps, 'step')} of {each}; the first took "
                f"{first}), not counting validation"
            )

    def stop(self) -> None:
        """Removes the bar."""
        working(None)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Speed:
    """Times of the steps of this process, measured between two fetches of the losses.

    Attributes:
        windows: number of steps and seconds between two fetches; the first one compiles.
        first: seconds of the first window.
        validation: seconds of the last validation.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self.windows: list[tuple[int, float]] = []
        self.first = self.validation = 0.0

    def start(self) -> None:
        """Starts a window."""
        self._begun = perf_counter()

    def add(self, steps: int) -> None:
        """Ends a window of this number of steps and starts the next one."""
        begun = self._begun
        self.start()
        self.first = self.first or self._begun - begun
        self.windows.append((steps, self._begun - begun))

    @property
    def samples_per_s(self) -> float:
        """Returns samples per second of training, without the first window and validation."""
        steps, seconds = map(sum, zip(*self._steady, strict=True))
        return steps * self._batch_size / max(seconds, 1e-9)

    @property
    def step_ms(self) -> float:
        """Returns milliseconds per step, the median over the windows."""
        return 1000 * statistics.median(seconds / steps for steps, seconds in self._steady)

    @property
    def compile_s(self) -> float:
        """Returns the seconds that the first step took more than a later one."""
        return max(self.first - self.step_ms / 1000, 0.0)

    def left(self, steps: int, epochs: int) -> float:
        """Returns the expected seconds of so many steps and validations, 0 if unknown."""
        return self.step_ms / 1000 * steps + self.validation * epochs if self.windows else 0.0

    @property
    def _steady(self) -> list[tuple[int, float]]:
        return self.windows[1:] or self.windows


def _column(name: str, value: float) -> tuple[str, str, int]:
    text = f"{value:.4f}"
    return name, text, max(_NUMBER, len(name), len(text))


def _table_lines(parts: list[tuple[str, list[tuple[str, str, int]]]]) -> tuple[str, str, str]:
    """Returns the header of groups, the header of columns, and the row."""
    parts = [(group, columns) for group, columns in parts if columns]
    widths = [sum(wide for *_, wide in columns) + 2 * len(columns) - 2 for _, columns in parts]
    groups = [f"{group:>{wide}}" for (group, _), wide in zip(parts, widths, strict=True)]
    cells = [cell for _, columns in parts for cell in columns]
    names = [f"{name:>{wide}}" for name, _, wide in cells]
    row = [f"{text:>{wide}}" for _, text, wide in cells]
    return "  ".join(groups).rstrip(), "  ".join(names), "  ".join(row)


def _fits(lines: tuple[str, str, str]) -> bool:
    return len(lines[-1]) < width()
