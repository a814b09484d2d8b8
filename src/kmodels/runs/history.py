"""history.csv: a row per step and one per epoch, written soon after they end.

Every run has the columns of `COLUMNS`; columns of further metrics follow.
"""

import csv
import logging
import os
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_write, no_link, writing
from kmodels.runs import console, trackers

log = logging.getLogger("kmodels")

COLUMNS: tuple[str, ...] = (
    "row",
    "epoch",
    "step",
    "loss",
    "accuracy",
    "val_loss",
    "val_accuracy",
    "learning_rate",
    "samples_per_s",
    "seconds",
)


class History:
    """The rows of a run, in memory and in its file.

    Args:
        path: the csv file. Rows of an earlier part of the run are read from it.
        until: step of the checkpoint; rows of later steps are dropped, as those steps run again.
        epochs: number of finished epochs whose rows are read.
        writes: False for all processes except rank zero, which have the rows in memory only.

    Attributes:
        columns: names of the columns, in the order of the file.
        tracker: experiment tracker for new rows, or None.
        missing: number of steps up to `until` whose rows are not in the file.
    """

    def __init__(self, path: Path, until: int = 0, epochs: int = 0, writes: bool = True):
        self.path, self._writes = path, writes
        self.tracker: trackers.Tracker | None = None
        self.rows: list[dict[str, Any]] = []
        self.columns = list(COLUMNS)
        if until and path.is_file():
            self.rows = [
                row
                for row in read(path)
                if (row["step"] <= until if row["row"] == "step" else row["epoch"] <= epochs)
            ]
        steps = {row["step"] for row in self.rows if row["row"] == "step"}
        self.missing = len(set(range(1, until + 1)) - steps)
        self._add_columns(self.rows)
        if writes:
            atomic_write(path, self._rewrite)
        if writes and self.missing:
            console.say(
                f"history.csv lacks {self.missing} of {until} steps; the run continues without them"
            )

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Appends rows; "row" is "step" or "epoch", other keys are columns."""
        self.rows += rows
        if not self._writes:
            return
        if self._add_columns(rows):
            atomic_write(self.path, self._rewrite)
        else:
            mode: Any = {"mode": "a", "newline": "", "opener": no_link}
            with writing(self.path), open(self.path, **mode) as file:
                csv.DictWriter(file, self.columns).writerows([_text(row) for row in rows])
        if self.tracker is not None:
            trackers.log_rows(self.tracker, rows)

    def sync(self) -> None:
        """Waits until all rows are on the disk, so that a power failure loses none."""
        if self._writes:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    @property
    def step_losses(self) -> list[float]:
        """The loss of every step so far."""
        return [row["loss"] for row in self.rows if row["row"] == "step"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The rows of the epochs."""
        return [row for row in self.rows if row["row"] == "epoch"]

    def _add_columns(self, rows: list[dict[str, Any]]) -> bool:
        """Returns True if these rows have columns that the file lacks."""
        known = len(self.columns)
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        return len(self.columns) > known

    def _rewrite(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows([_text(row) for row in self.rows])


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a history.csv; a warning counts damaged rows, which are skipped.

    A partial row at the end, left by a killed process, is dropped without a warning.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            rows = [_parse(row) for row in reader]
        except csv.Error as error:
            raise InputError(f"{path} is not a table: {error}; remove it") from None
    damaged = rows[:-1].count(None)
    if damaged:
        log.warning("%s: skipped %d damaged rows of %d", path, damaged, len(rows))
    return [row for row in rows if row is not None]


def _text(row: dict[str, Any]) -> dict[str, Any]:
    # repr gives a float's shortest text that reads back as the same float.
    return {k: repr(v) if isinstance(v, float) else v for k, v in row.items()}


def _parse(row: dict[str, Any]) -> dict[str, Any] | None:
    try:
        parsed: dict[str, Any] = {"row": row["row"], "epoch": int(row["epoch"])}
        parsed["step"] = int(row["step"])
        parsed |= {name: float(row[name]) for name in row if name not in parsed and row[name]}
    except (KeyError, ValueError, TypeError):
        return None
    return parsed if parsed["row"] in ("step", "epoch") and "loss" in parsed else None
