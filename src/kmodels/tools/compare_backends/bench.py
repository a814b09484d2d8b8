"""`kmodels bench`: trains one model on each backend, in processes that take turns."""

import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kmodels.core.environment import BACKENDS
from kmodels.core.errors import InputError, pluralize
from kmodels.tools.compare_backends.children import (
    Child,
    ChildError,
    LeftOut,
    OutOfMemory,
    environment,
    installed,
    stopped_by_signals,
)
from kmodels.tools.compare_backends.options import (
    AUTO,
    LOSSES,
    MODES,
    OPENXLA,
    BenchOptions,
    listed,
    numbers,
)

__all__ = ["BenchOptions", "Case", "Refused", "installed", "listed", "make_cases", "numbers", "run"]

# The packages that the OpenXLA mode needs besides torch; Keras imports all others that it finds.
NEEDS = {OPENXLA: ("torchax", "jax")}
HOW = (
    "make an environment for it (python -m venv openxla; openxla/bin/pip install --pre torchax "
    "'kmodels[jax,torch]') and give --python openxla=openxla/bin/python"
)


FORMAT = 1
# The facts that all rows share, and those that rows of one precision share besides.
ALL = (
    *("parameters", "trainable_parameters", "dropout", "image_shape", "optimizer"),
    *("kmodels", "keras", "threads", "text"),
)
OF_PRECISION = ("variables", "compute", "products")
# Another process is started if this many times the largest peak so far is free.
ROOM = 1.3
# The share of the free host memory that a step may use in the search for the largest batch.
SHARE = 0.8
# That search ends at a gap of this share, since each try starts a process and compiles.
GAP = 1 / 16
MOST = 2**20


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        backend: backend of Keras.
        precision: a key of `PRECISIONS`.
        compile: a mode of the backend, or "auto".
        generic: ops without their overrides, as in KMODELS_GENERIC_OPS.
        workers: workers of the image loader, or None for batches made in advance.
        python: the interpreter.
    """

    backend: str
    precision: str
    compile: str = AUTO
    generic: str = ""
    workers: int | None = None
    python: str = sys.executable

    @property
    def ops(self) -> str:
        """The path that the ops take, in words."""
        return {"": "override", "all": "generic"}.get(self.generic, f"generic {self.generic}")

    @property
    def label(self) -> str:
        """The name of the row in messages."""
        loader = [] if self.workers is None else [pluralize(self.workers, "worker")]
        return " · ".join([self.backend, self.precision, self.compile, self.ops, *loader])

    @property
    def hidden(self) -> list[str]:
        """Packages that its process must not find."""
        wanted = (self.backend, *NEEDS.get(self.compile, ()))
        return [name for name in BACKENDS if name not in wanted]


def make_cases(options: BenchOptions) -> tuple[list[Case], list[str]]:
    """Returns all rows, sorted by precision, and a line for each omitted setting.

    Raises:
        InputError: if a named backend is not installed, or no row is left.
    """
    pythons = options.interpreters()
    notes: list[str] = []
    backends = _backends(options, pythons, notes)
    modes = _modes(options, backends, pythons, notes)
    cases = [
        Case(backend, precision, mode, generic, workers, _python(pythons, backend, mode))
        for precision in options.precisions
        for backend in backends
        for mode, generic, workers in product(
            modes[backend], _paths(options), options.workers or (None,)
        )
    ]
    if not cases:
        raise InputError("; ".join(notes))
    return cases, notes


def _python(pythons: dict[str, str], backend: str, mode: str = "") -> str:
    return pythons.get(mode) or pythons.get(backend) or sys.executable


def _backends(options: BenchOptions, pythons: dict[str, str], notes: list[str]) -> list[str]:
    names = []
    for backend in options.named or BACKENDS:
        # The interpreters of its modes may have a backend that this one does not.
        modes = [mode for mode in MODES[backend] if mode in options.compile]
        elsewhere = bool(modes) and all(mode in pythons for mode in modes)
        wanted = {backend, "keras"}
        if elsewhere or installed(_python(pythons, backend), [*wanted]) >= wanted:
            names.append(backend)
            continue
        text = f"{backend} is not installed: pip install 'kmodels[{backend}]'"
        if options.named:
            raise InputError(text)
        notes.append(f"left out: {text}")
    return names


def _modes(
    options: BenchOptions, backends: list[str], pythons: dict[str, str], notes: list[str]
) -> dict[str, list[str]]:
    """Returns the modes of each backend; raises InputError for a mode that no backend has."""
    wanted = [mode for mode in options.compile if mode != AUTO]
    if nowhere := [mode for mode in wanted if not any(mode in MODES[name] for name in backends)]:
        has = "; ".join(f"{name} has {', '.join(MODES[name])}" for name in backends)
        raise InputError(f"compile is {', '.join(nowhere)}, which no backend here has: {has}")
    modes: dict[str, list[str]] = {}
    for backend in backends:
        modes[backend] = [mode for mode in options.compile if mode in (AUTO, *MODES[backend])]
        absent = [mode for mode in wanted if mode not in MODES[backend]]
        if not modes[backend]:
            modes[backend] = [AUTO]
            notes.append(f"{backend} has no {' or '.join(absent)}: its default is measured")
        elif absent:
            notes.append(f"left out: {backend} has no {' or '.join(absent)}")
        if OPENXLA in modes[backend]:
            needed = ["torch", *NEEDS[OPENXLA]]
            if missing := {*needed} - installed(_python(pythons, backend, OPENXLA), needed):
                modes[backend].remove(OPENXLA)
                notes.append(f"left out: openxla needs {', '.join(sorted(missing))}; {HOW}")
    return modes


def _paths(options: BenchOptions) -> list[str]:
    """Returns values of KMODELS_GENERIC_OPS."""
    paths = ["" if name == "override" else "all" for name in options.ops]
    paths += ["" if name == "fused" else "attention" for name in options.attention]
    return list(dict.fromkeys(paths)) or [""]


def run(options: BenchOptions, console: Console | None = None) -> dict[str, Any]:
    """Measures all rows.

    Args:
        options: settings of the measurement.
        console: for the progress bar; none is shown without a terminal.

    Returns:
        Plain values: `preset`, `unit`, `options`, `hardware`, `date`, `tolerances` of losses,
        `left_out` (sentences) and `rows`. A row that failed has a sentence as `failed`; the others
        have `facts`, `losses`, `loss_difference`, `seconds` by step, `step_s` (median and
        quartiles), `rate` (of `unit` per second), `build_s`, `compile_s`, `peak_memory_mb`,
        `largest_batch`, `took` (path by op) and `group`: rows of one group took turns.

    Raises:
        InputError: for wrong settings.
        Refused: if rows differ in more than the compared settings; lists all differences.
    """
    cases, notes = make_cases(options)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    bar = Progress(*columns, console=console, transient=True, disable=not shown)
    with stopped_by_signals(), bar as progress:
        bench = _Bench(options, progress, notes, len(cases))
        for _, members in groupby(cases, lambda case: case.precision):
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
    """One run: its rows and its progress bar."""

    def __init__(self, options: BenchOptions, progress: Progress, notes: list[str], count: int):
        self.options, self.notes = options, notes
        self.rows: list[_Row] = []
        self._progress = progress
        self._bar = progress.add_task("", total=count * (1 + options.rounds))
        self._groups = 0
        self._without_tf32: set[str] = set()

    def measure(self, waiting: list[Case]) -> None:
        """Times the rows of a precision, as many at a time as fit into memory."""
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
        """Searches for the largest batch of each row, each in a new process."""
        for row in self._good():
            self._say(f"{row.values['label']}: largest batch")
            try:
                fits = functools.partial(self._fits, row.case)
                row.values["largest_batch"] = largest(fits, self.options.batch_size)
            except ChildError as error:
                self.notes.append(f"largest batch: {error}")

    def _good(self) -> list[_Row]:
        return [row for row in self.rows if row.values["failed"] is None]

    def _say(self, text: str, steps: int = 0) -> None:
        self._progress.update(self._bar, description=text, advance=steps)

    def _child(self, case: Case, **changes: object) -> Child:
        options, cpus = self.options, self.options.cpus
        names = ("preset", "lora", "rank", "optimizer")
        job = options.job | {name: getattr(options, name) for name in names}
        job |= {"precision": case.precision, "compile": case.compile, "workers": case.workers}
        threads = options.threads or len(cpus) or os.cpu_count() or 1
        return Child(
            case.label,
            "kmodels.tools.compare_backends.work",
            {**job, "command": "bench", "ready": 4, **changes},
            python=case.python,
            environment=environment(case.backend, case.generic, threads),
            hidden=case.hidden,
            cpus=cpus,
            limit=options.limit,
        )

    def _start(self, stack: ExitStack, case: Case) -> _Row | None:
        """Starts a row and runs its first steps; None for a row that is left out or failed."""
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
        """Returns True if memory is left for another process; one is always tried."""
        if not group or (left := group[-1].values["facts"]["host_bytes"]) is None:
            return True
        return left > ROOM * max(row.values["peak_memory_mb"] for row in group) * 2**20

    def _compare(self) -> None:
        good = [row.values for row in self._good()]
        if lines := differences(good):
            raise Refused(lines)
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


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Returns the largest number that fits, to within a sixteenth: doubling, then bisection.

    Args:
        fits: returns True if a number fits; then all smaller ones do.
        start: the number to begin with, at least 1.

    Returns:
        A number that was tried and fits, 0 if not even 1 does. The first one that was tried and
        does not fit is at most a sixteenth above it, or one more.
    """
    low, high = 0, start
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    if high > MOST:
        return low
    while high - low > max(1, int(low * GAP)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Refused(InputError):
    """Rows differ in more than the compared settings.

    Attributes:
        lines: one difference each.
    """

    def __init__(self, lines: Sequence[str]):
        super().__init__("; ".join(lines))
        self.lines = list(lines)


def differences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each value that must be equal between rows and differs.

    Args:
        rows: with `label`, `precision`, `losses` and `facts`; the others are compared with the
            first row, and with the first row of their precision.
    """
    lines = []
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        beside = first.setdefault(row["precision"], row)
        lines += _facts(rows[0], row, ALL)
        lines += _facts(beside, row, OF_PRECISION)
        lines += _losses(beside, row)
    return lines


def _facts(beside: dict[str, Any], row: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [
        f"{row['label']}: {name} is {row['facts'].get(name)!r}, "
        f"{beside['label']} has {beside['facts'].get(name)!r}"
        for name in names
        if row["facts"].get(name) != beside["facts"].get(name)
    ]


def _losses(beside: dict[str, Any], row: dict[str, Any]) -> list[str]:
    allowed = LOSSES[row["precision"]]
    pairs = list(zip(_compared(beside), _compared(row), strict=True))
    for step, (theirs, ours) in enumerate(pairs, 1):
        # Not ">", which is False for a NaN.
        if not abs(ours - theirs) <= allowed * abs(theirs):
            return [
                f"{row['label']}: the loss of step {step} is {ours:.6g}, {beside['label']} has "
                f"{theirs:.6g}; the allowed relative difference is {allowed:g}"
            ]
    return []


def _compared(row: dict[str, Any]) -> list[float]:
    """Returns the first losses; with dropout that of evaluation, which drops nothing."""
    evaluated = row["facts"].get("evaluated")
    return row["losses"] if evaluated is None else [evaluated]


def loss_difference(beside: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns the largest relative difference between the losses of two rows."""
    pairs = zip(_compared(beside), _compared(row), strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-30) for theirs, ours in pairs)


def times(
    seconds: Sequence[float], first_s: float, options: BenchOptions, text: bool
) -> dict[str, Any]:
    """Returns the speed of a row and the time that it compiled."""
    median = statistics.median(seconds)
    low, high = median, median
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    items = options.batch_size * (options.sequence_length if text else 1)
    return {
        "rate": round(items / median, 3),
        "step_s": {"median": round(median, 5), "low": round(low, 5), "high": round(high, 5)},
        "seconds": [round(one, 5) for one in seconds],
        "compile_s": round(max(first_s - median, 0.0), 2),
    }


def result(
    options: BenchOptions, rows: Sequence[dict[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of bench.json, see `run`."""
    settings = asdict(options)
    # The paths of interpreters are local to this machine.
    settings.pop("python")
    text = any(row["facts"]["text"] for row in rows if row["failed"] is None)
    return {
        "kind": "kmodels bench",
        "format": FORMAT,
        "preset": options.preset,
        "unit": "tokens" if text else "images",
        "options": settings,
        "hardware": {"processor": _processor(), "cpus": len(options.cpus) or os.cpu_count()},
        "date": time.strftime("%Y-%m-%d"),
        "tolerances": {name: LOSSES[name] for name in options.precisions},
        "left_out": list(notes),
        "rows": list(rows),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
