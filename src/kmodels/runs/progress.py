"""The progress of a run: a table with a row per epoch, a bar on a terminal, measured times."""

import statistics
import sys
from collections.abc import Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any

from kmodels.core.units import pluralize
from kmodels.runs import console

# Where there is no bar, a line is printed after so many seconds without one.
QUIET_SECONDS = 30.0
# Numbers of Keras' logs that are this wide, or wider if their names are.
_NUMBER = 7
NONE = "", "", ""


class Progress:
    """Shows losses, metrics, speed and the time left.

    Args:
        total: steps of the whole run.
        done: steps taken before a resume.
        epochs: of the whole run.
    """

    def __init__(self, total: int, done: int = 0, epochs: int = 1):
        self.total, self.done, self.epochs = total, done, epochs
        self._bar: Any = None
        self._task: Any = None
        self._head = ("", "")
        self._said = perf_counter()

    def start(self) -> None:
        """Puts up the bar, if there is a terminal."""
        self._said = perf_counter()
        if not sys.stdout.isatty():
            console.working("compiling the first step")
            return
        console.working(None)
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
            "compiling the first step", total=self.total, completed=self.done, loss=""
        )
        self._bar.start()

    def doing(self, text: str) -> None:
        """Says beside the bar what the run does, such as "validation"."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def update(self, step: int, loss: float, seconds_left: float) -> None:
        """Moves the bar; elsewhere prints a line if there was none for a while.

        Args:
            step: finished steps of the run.
            loss: of the last one.
            seconds_left: of the run, for the line.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"loss {loss:.4f}")
            return
        console.working(None)
        if perf_counter() - self._said > QUIET_SECONDS:
            left = timedelta(seconds=round(seconds_left))
            self.say(f"step {step:,} of {self.total:,}  loss {loss:.4f}  {left} left")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._said = perf_counter()
        console.say(text)

    def epoch(
        self, epoch: int, logs: Mapping[str, float], speed: float | None, seconds_left: float
    ) -> None:
        """Prints the row of an epoch, below a head where the columns are new.

        Args:
            epoch: its number, from 1 on.
            logs: Keras' names and numbers.
            speed: samples per second, where they were measured.
            seconds_left: of the run.
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
        # The speed is what a narrow terminal can do without.
        groups, names, row = next(filter(_fits, map(_lines, (parts, parts[:3] + parts[4:]))), NONE)
        if not row:
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
            console.say(f"epoch {number}  {numbers}  {left} left")
            return
        if self._head != (groups, names):
            self._head = groups, names
            print(f"\n{groups}\n{names}")
        print(row, flush=True)

    def estimate(self, steps: int, left: float, speed: "Speed") -> None:
        """Prints how long the run will take, if it takes longer than a moment.

        Args:
            steps: steps left.
            left: seconds left.
            speed: measured times.
        """
        if steps and left > console.SILENT_SECONDS:
            first = console.seconds(speed.first)
            each = console.seconds(speed.step_ms / 1000)
            self.say(
                f"about {console.seconds(left)} for the {pluralize(steps, 'step')} left, "
                f"validation aside ({each} a step; the first took {first})"
            )

    def stop(self) -> None:
        """Takes the bar down."""
        console.working(None)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Speed:
    """Times of the steps of this process, measured between two fetches of the losses.

    Args:
        batch_size: samples per step.

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
        """Begins a window."""
        self._begun = perf_counter()

    def add(self, steps: int) -> None:
        """Ends a window after so many steps, and begins the next one."""
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
        """Returns the seconds that so many steps and validations will take, 0 if unknown."""
        return self.step_ms / 1000 * steps + self.validation * epochs if self.windows else 0.0

    @property
    def _steady(self) -> list[tuple[int, float]]:
        return self.windows[1:] or self.windows


def _column(name: str, value: float) -> tuple[str, str, int]:
    text = f"{value:.4f}"
    return name, text, max(_NUMBER, len(name), len(text))


def _lines(parts: list[tuple[str, list[tuple[str, str, int]]]]) -> tuple[str, str, str]:
    """Returns the names of groups, those of columns, and the row."""
    parts = [(group, columns) for group, columns in parts if columns]
    widths = [sum(wide for *_, wide in columns) + 2 * len(columns) - 2 for _, columns in parts]
    groups = [f"{group:>{wide}}" for (group, _), wide in zip(parts, widths, strict=True)]
    cells = [cell for _, columns in parts for cell in columns]
    names = [f"{name:>{wide}}" for name, _, wide in cells]
    row = [f"{text:>{wide}}" for _, text, wide in cells]
    return "  ".join(groups).rstrip(), "  ".join(names), "  ".join(row)


def _fits(lines: tuple[str, str, str]) -> bool:
    return len(lines[-1]) < console.width()
