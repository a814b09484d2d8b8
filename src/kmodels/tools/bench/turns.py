"""Starts the processes of all rows, compares their losses, and lets them take turns."""

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kmodels.tools.bench.cases import Case, make_cases
from kmodels.tools.bench.compare import Refused, differences, loss_difference
from kmodels.tools.bench.environment import environment
from kmodels.tools.bench.largest import largest
from kmodels.tools.bench.options import BenchOptions
from kmodels.tools.bench.result import result, times
from kmodels.tools.children import Child, ChildError, LeftOut, OutOfMemory, stopped_by_signals

WORK = "kmodels.tools.bench.work"
# Another process is started where this many times the largest peak so far is left.
ROOM = 1.3
# The share of what the host has left that a step may take while the largest batch is looked for.
SHARE = 0.8
_JOB = (
    *("preset", "batch_size", "image_size", "num_classes", "sequence_length"),
    *("lora", "rank", "optimizer", "seed"),
)


def run(options: BenchOptions, console: Console | None = None) -> dict[str, Any]:
    """Measures all rows.

    Args:
        options: what to measure.
        console: for the progress bar; none is shown without a terminal.

    Returns:
        Plain values: `preset`, `unit`, `options`, `hardware`, `date`, `tolerances` of losses,
        `left_out` (sentences) and `rows`. A row that failed has a sentence as `failed`; the others
        have `facts`, `losses`, `loss_difference`, `seconds` by step, `step_s` (median and
        quartiles), `rate` (of `unit` per second), `build_s`, `compile_s`, `peak_memory_mb`,
        `largest_batch`, `took` (path by op) and `group`: rows of one group took turns.

    Raises:
        InputError: for wrong settings.
        Refused: where rows differ in more than what they are to compare; lists all of it.
    """
    chosen, notes = make_cases(options)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=not shown)
    with stopped_by_signals(), bar as progress:
        bench = _Bench(options, progress, notes, len(chosen))
        for _, members in groupby(chosen, lambda case: case.precision):
            bench.measure(list(members))
        if options.largest_batch:
            bench.find_largest()
    return result(options, [row.values for row in bench.rows], notes)


@dataclass
class _Row:
    case: Case
    values: dict[str, Any]
    child: Child | None = None
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)


class _Bench:
    """One run: its rows, and the bar that shows how far it is."""

    def __init__(self, options: BenchOptions, progress: Progress, notes: list[str], count: int):
        self.options, self.notes = options, notes
        self.rows: list[_Row] = []
        self._progress = progress
        self._bar = progress.add_task("", total=count * (1 + options.rounds))
        self._groups = 0
        self._without_tf32: set[str] = set()

    def measure(self, waiting: list[Case]) -> None:
        """Times the rows of a precision, as many at a time as the memory holds."""
        while waiting:
            with ExitStack() as stack:
                group: list[_Row] = []
                while waiting and len(group) < self.options.together and self._has_room(group):
                    row = self._start(stack, waiting.pop(0))
                    group += [] if row is None else [row]
                self._compare()
                self._take_turns(group)
            self._groups += bool(group)

    def find_largest(self) -> None:
        """Looks for the largest batch of each row, in processes of their own."""
        for row in self._good():
            self._say(f"{row.values['label']}: largest batch")

            def fits(size: int, case: Case = row.case) -> bool:
                return self._fits(case, size)

            try:
                row.values["largest_batch"] = largest(fits, self.options.batch_size)
            except ChildError as error:
                self.notes.append(f"largest batch: {error}")

    def _good(self) -> list[_Row]:
        return [row for row in self.rows if row.values["failed"] is None]

    def _say(self, text: str, steps: int = 0) -> None:
        self._progress.update(self._bar, description=text, advance=steps)

    def _child(self, case: Case, **changes: object) -> Child:
        job = {name: getattr(self.options, name) for name in _JOB}
        job |= {"precision": case.precision, "compile": case.compile, "workers": case.workers}
        options, cpus = self.options, self.options.cpus
        threads = options.threads or len(cpus) or os.cpu_count() or 1
        return Child(
            case.label,
            WORK,
            {**job, "ready": 4, **changes},
            python=case.python,
            environment=environment(case.backend, case.generic, threads),
            hidden=case.hidden,
            cpus=cpus,
            limit=self.options.limit,
        )

    def _start(self, stack: ExitStack, case: Case) -> _Row | None:
        """Builds, compiles and makes the first steps; None for a row that is not to be timed."""
        self._say(f"{case.label}: starts", 1)
        if case.precision == "tf32" and case.backend in self._without_tf32:
            return None
        names = ("backend", "precision", "compile", "ops", "workers", "label")
        row = _Row(case, {name: getattr(case, name) for name in names} | {"failed": None})
        try:
            row.child = stack.enter_context(self._child(case))
            ready = row.child.started()
            self._say(f"{case.label}: first steps")
            first = row.child.ask(steps=self.options.check_steps)
        except LeftOut as error:
            if case.precision == "tf32":
                self._without_tf32.add(case.backend)
            self.notes.append(f"left out: {error}")
            return None
        except ChildError as error:
            row.values["failed"] = str(error)
            self.rows.append(row)
            return None
        facts = ready["facts"]
        label = case.label.replace(f" {case.compile} ", f" {facts['compile']} ")
        row.values |= {"facts": facts, "compile": facts["compile"], "label": label}
        row.values |= {"losses": first["losses"], "build_s": round(ready["build_s"], 3)}
        row.values |= {"group": self._groups, "largest_batch": None}
        row.first_s = first["seconds"][0]
        self._note(row, first)
        self.rows.append(row)
        return row

    def _note(self, row: _Row, answer: dict[str, Any]) -> None:
        row.values |= {"peak_memory_mb": answer["peak_memory_mb"], "took": answer["ops"]}
        row.values["facts"]["host_bytes"] = answer["host_bytes"]

    def _has_room(self, group: list[_Row]) -> bool:
        """Returns whether one process more finds memory; a single one is always tried."""
        if not group or (left := group[-1].values["facts"]["host_bytes"]) is None:
            return True
        return left > ROOM * max(row.values["peak_memory_mb"] for row in group) * 2**20

    def _compare(self) -> None:
        good = [row.values for row in self._good()]
        if found := differences(good):
            raise Refused(found)
        first: dict[str, dict[str, Any]] = {}
        for values in good:
            beside = first.setdefault(values["precision"], values)
            values["loss_difference"] = float(f"{loss_difference(beside, values):.2g}")

    def _take_turns(self, group: list[_Row]) -> None:
        for turn in range(self.options.rounds):
            order = [row for row in group if row.values["failed"] is None]
            shift = turn % max(len(order), 1)
            for row in [*order[shift:], *order[:shift]]:
                assert row.child is not None
                self._say(f"{row.values['label']}: round {turn + 1}", 1)
                try:
                    answer = row.child.ask(steps=self.options.steps)
                except ChildError as error:
                    row.values["failed"] = str(error)
                    continue
                row.seconds += answer["seconds"]
                self._note(row, answer)
        for row in group:
            if row.values["failed"] is None:
                text = row.values["facts"]["text"]
                row.values |= times(row.seconds, row.first_s, self.options, text)

    def _fits(self, case: Case, size: int) -> bool:
        try:
            with self._child(case, batch_size=size, ready=1) as child:
                facts = child.started()["facts"]
                most = self.options.memory
                if facts["cpu"]:
                    if most is None and facts["host_bytes"] is not None:
                        most = int(SHARE * facts["host_bytes"])
                    child.memory = most
                peak = child.ask(steps=2)["peak_memory_mb"] * 2**20
        except OutOfMemory:
            return False
        return most is None or peak <= most
