"""The progress of a run: a bar on a terminal, a line per epoch elsewhere."""

import sys
from datetime import timedelta
from typing import Any


class Progress:
    """Shows loss, images per second and the time left.

    Args:
        total: steps of the whole run.
        done: steps taken before a resume.
    """

    def __init__(self, total: int, done: int = 0):
        self.total, self.done = total, done
        self._bar: Any = None
        self._task: Any = None

    def start(self) -> None:
        """Puts up the bar, if there is a terminal."""
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} samples/s"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task(
            "training", total=self.total, completed=self.done, loss="-", speed="-"
        )
        self._bar.start()

    def update(self, step: int, loss: float, speed: float | None) -> None:
        """Moves the bar."""
        if self._bar is not None:
            shown = f"{speed:,.0f}" if speed else "-"
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=shown)

    def epoch(self, text: str, seconds_left: float | None) -> None:
        """Prints the line of an epoch."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
            return
        left = "" if seconds_left is None else f"  {timedelta(seconds=round(seconds_left))} left"
        print(text + left, flush=True)

    def stop(self) -> None:
        """Takes the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
