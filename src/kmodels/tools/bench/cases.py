"""The rows of the table: which combinations there are, and why others are left out."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from kmodels.core.backend_choice import BACKENDS
from kmodels.core.errors import InputError
from kmodels.core.units import pluralize
from kmodels.tools.bench.options import AUTO, MODES, BenchOptions
from kmodels.tools.children import installed

OPENXLA = "openxla"
# The packages that OpenXLA's mode needs beside torch; Keras imports all others that it finds.
NEEDS = {OPENXLA: ("torchax", "jax")}
HOW = (
    "make an environment for it (python -m venv openxla; openxla/bin/pip install --pre torchax "
    "'kmodels[jax,torch]') and give --python openxla=openxla/bin/python"
)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        backend: backend of Keras.
        precision: a key of `PRECISIONS`.
        compile: a mode of the backend, or "auto".
        generic: ops without their overrides, as in KMODELS_GENERIC_OPS.
        workers: workers of the loader, or None where batches lie ready.
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
        """Packages that its process shall not find."""
        wanted = (self.backend, *NEEDS.get(self.compile, ()))
        return [name for name in BACKENDS if name not in wanted]


def make_cases(options: BenchOptions) -> tuple[list[Case], list[str]]:
    """Returns all rows, those of a precision together, and a line for each thing that is left out.

    Raises:
        InputError: for a backend that was named and is not installed, or where no row is left.
    """
    pythons = options.interpreters()
    notes: list[str] = []
    backends = _backends(options, pythons, notes)
    modes = _modes(options, backends, pythons, notes)
    found = [
        Case(backend, precision, mode, generic, workers, _python(pythons, backend, mode))
        for precision in options.precisions
        for backend in backends
        for mode, generic, workers in product(
            modes[backend], _paths(options), options.workers or (None,)
        )
    ]
    if not found:
        raise InputError("; ".join(notes))
    return found, notes


def _python(pythons: dict[str, str], backend: str, mode: str = "") -> str:
    return pythons.get(mode) or pythons.get(backend) or sys.executable


def _backends(options: BenchOptions, pythons: dict[str, str], notes: list[str]) -> list[str]:
    found = []
    for backend in options.named or BACKENDS:
        if installed(_python(pythons, backend), [backend, "keras"]) >= {backend, "keras"}:
            found.append(backend)
            continue
        # Its own mode may still have an interpreter with it.
        if _names_own(options, pythons, backend):
            found.append(backend)
            continue
        text = f"{backend} is not installed: pip install 'kmodels[{backend}]'"
        if options.named:
            raise InputError(text)
        notes.append(f"left out: {text}")
    return found


def _names_own(options: BenchOptions, pythons: dict[str, str], backend: str) -> bool:
    asked = [mode for mode in MODES[backend] if mode in options.compile]
    return bool(asked) and all(mode in pythons for mode in asked)


def _modes(
    options: BenchOptions, backends: list[str], pythons: dict[str, str], notes: list[str]
) -> dict[str, list[str]]:
    """Returns the modes of each backend; one that no backend has is an error."""
    wanted = [mode for mode in options.compile if mode != AUTO]
    if nowhere := [mode for mode in wanted if not any(mode in MODES[name] for name in backends)]:
        has = "; ".join(f"{name} has {', '.join(MODES[name])}" for name in backends)
        raise InputError(f"compile is {', '.join(nowhere)}, which no backend here has: {has}")
    found: dict[str, list[str]] = {}
    for backend in backends:
        there: Callable[[str], bool] = (AUTO, *MODES[backend]).__contains__
        found[backend] = [mode for mode in options.compile if there(mode)]
        absent = [mode for mode in wanted if not there(mode)]
        if not found[backend]:
            found[backend] = [AUTO]
            notes.append(f"{backend} has no {' or '.join(absent)}: its own way is measured")
        elif absent:
            notes.append(f"left out: {backend} has no {' or '.join(absent)}")
        if OPENXLA in found[backend]:
            python = _python(pythons, backend, OPENXLA)
            if missing := {"torch", *NEEDS[OPENXLA]} - installed(
                python, ["torch", *NEEDS[OPENXLA]]
            ):
                found[backend].remove(OPENXLA)
                notes.append(f"left out: openxla needs {', '.join(sorted(missing))}; {HOW}")
    return found


def _paths(options: BenchOptions) -> list[str]:
    """Returns values of KMODELS_GENERIC_OPS."""
    found = ["" if name == "override" else "all" for name in options.ops]
    found += ["" if name == "fused" else "attention" for name in options.attention]
    return list(dict.fromkeys(found)) or [""]
