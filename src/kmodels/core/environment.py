"""Environment variables: the choice of Keras' backend, and variables for child processes.

Keras reads KERAS_BACKEND when it is imported, and nothing changes its backend after that. So
`import kmodels` chooses it before, in this order:

1. KERAS_BACKEND, if it is set.
2. The backend in `keras.json`, if that backend is installed. Keras writes this file by itself, with
   `tensorflow` in it, when it is first imported, whether TensorFlow is installed or not.
3. The first of jax, torch and tensorflow that is installed. A line on stderr names it.

A missing or outdated Keras is reported at the same moment.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kmodels.core.errors import InputError

BACKENDS = ("jax", "torch", "tensorflow")
VARIABLE = "KERAS_BACKEND"
# The floor in pyproject.toml, as a test says.
OLDEST_KERAS = "3.15"
# Both are the package `keras`; the nightly build stands first where both are installed.
KERAS_PACKAGES = ("keras-nightly", "keras")


def check_keras() -> None:
    """Checks that a Keras is installed that is new enough.

    Raises:
        ImportError: if not. The `kmodels` command prints the same line and exits with code 2, since
            Python would print a stack trace.
    """
    installed = _keras_version()
    if installed is not None and _numbers(installed) >= _numbers(OLDEST_KERAS):
        return
    there = "none is installed" if installed is None else f"{installed} is installed"
    line = (
        f"kmodels needs Keras {OLDEST_KERAS} or newer, and {there}; "
        f"pip install --upgrade 'keras>={OLDEST_KERAS}'"
    )
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # while Python imports the package of `python -m kmodels`
        program = sys.orig_argv[-len(sys.argv)]
    if Path(program).stem == "kmodels":
        print(f"kmodels: {line}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(line)


# All variables of kmodels.
VARIABLES = (
    *("KMODELS_BENCH_PYTHON", "KMODELS_DIRECT_CALLS", "KMODELS_GENERIC_OPS", "KMODELS_PREFETCH"),
    *("KMODELS_PROCESS_SECONDS", "KMODELS_RAY_DIRECTORY", "KMODELS_SMALL"),
)


def report_misspelt() -> None:
    """Prints a line for each variable whose name is almost one of kmodels'."""
    unknown = [x for x in os.environ if x.startswith("KMODELS") and x not in VARIABLES]
    for name in sorted(unknown):
        if near := difflib.get_close_matches(name, VARIABLES, 1, 0.8):
            print(f"kmodels: {name} is not read; did you mean {near[0]}?", file=sys.stderr)


def is_on(name: str, default: str = "0") -> bool:
    """Returns the value of a variable that is "1" or "0".

    Raises:
        InputError: for any other value.
    """
    text = os.environ.get(name) or default
    if text not in ("0", "1"):
        raise InputError(f"{name} is {text!r}; give 1 or 0, or unset it")
    return text == "1"


def choose_backend() -> None:
    """Sets KERAS_BACKEND if it is not set and Keras is not imported yet.

    It raises nothing: `check_backend` reports a wrong name, in one line.
    """
    if "keras" in sys.modules or os.environ.get(VARIABLE):
        return
    installed = installed_backends()
    if (configured := _configured()) in installed:
        os.environ[VARIABLE] = configured
    elif installed:
        os.environ[VARIABLE] = installed[0]
        print(
            f"kmodels: the backend is {installed[0]}, which is installed; "
            f"{VARIABLE} chooses another",
            file=sys.stderr,
        )


def check_backend() -> None:
    """Checks that Keras can be imported with the chosen backend.

    Raises:
        InputError: if no backend is installed, or if KERAS_BACKEND names one that kmodels does not
            support or that is not installed.
    """
    name, installed = os.environ.get(VARIABLE), installed_backends()
    if not installed:
        raise InputError(
            "no backend is installed; pip install jax, torch or tensorflow, one of which is enough"
        )
    if name and name not in BACKENDS:
        raise InputError(f"{VARIABLE} is {name!r}; choose one of {', '.join(BACKENDS)}")
    if name and name not in installed:
        raise InputError(
            f"{VARIABLE} is {name!r}, which is not installed; pip install {name}, "
            f"or set it to {' or '.join(installed)}"
        )


def hide_log_lines() -> None:
    """Hides the lines that a backend logs about itself while it is imported, for commands."""
    if os.environ.get(VARIABLE) == "tensorflow":
        from kmodels.core import internals_tensorflow

        internals_tensorflow.hide_information()


def installed_backends() -> list[str]:
    """Returns the installed ones of jax, torch and tensorflow, in this order."""
    return [name for name in BACKENDS if find_spec(name)]


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _keras_version() -> str | None:
    """Returns the version of the Keras that is imported or installed, or None."""
    if "keras" in sys.modules:
        return sys.modules["keras"].__version__
    for package in KERAS_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, as in `OLDEST_KERAS`."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _configured() -> str | None:
    """Returns the backend that `keras.json` names, or None if it names none."""
    folder = os.environ.get("KERAS_HOME")
    if folder is None:
        home = Path("~").expanduser()
        # Keras falls back to /tmp too. Only the name of a backend is read from there.
        shared = Path("/tmp")  # nosec B108
        folder = (home if os.access(home, os.W_OK) else shared) / ".keras"
    try:
        return json.loads((Path(folder).expanduser() / "keras.json").read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        return None  # Keras uses its default if the file cannot be read.


# Variables in which launchers say how many processes they have started.
_STARTED = ("WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES")
# The same of srun and mpirun, which may also start runs that have nothing to do with each other.
_SCHEDULED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def started_processes(is_joint: bool = False) -> tuple[str, int] | None:
    """Returns the variable and the number of processes of a launcher; None for one process.

    Args:
        is_joint: True if the run asks for a mesh, so that the processes of srun and mpirun belong
            together; torchrun, which srun may start, says otherwise by WORLD_SIZE.

    Raises:
        InputError: for a variable that is not a number.
    """
    scheduled = _SCHEDULED if is_joint and "WORLD_SIZE" not in os.environ else ()
    for name in (*_STARTED, *scheduled):
        text = os.environ.get(name) or "1"
        if not text.isdecimal():
            raise InputError(f"{name} is {text!r}; give a whole number from 0")
        if int(text) > 1:
            return name, int(text)
    return None


# `python -m` and `python -c` put the working directory first on sys.path, where a json.py or
# kmodels.py of somebody else's data would run. It holds for the children of children too.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@contextmanager
def environ_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in the block, for child processes that a library starts."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
