"""The choice of Keras' backend, made once for `import kmodels`, the command, recipes and notebooks.

Keras reads KERAS_BACKEND when it is imported, and nothing changes its backend after that. So the
choice is made before, by `import kmodels`, in this order:

1. KERAS_BACKEND, if it is set.
2. The backend in `keras.json`, if that backend is installed. Keras writes this file by itself, with
   `tensorflow` in it, when it is first imported, whether TensorFlow is there or not.
3. The first of jax, torch and tensorflow that is installed. A line on stderr says which.

A Keras that is too old is told at the same moment, before it fails somewhere in the midst.
"""

import json
import os
import re
import sys
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
    """Checks that there is a Keras that is new enough.

    Raises:
        ImportError: if not; in the `kmodels` command SystemExit with code 2, after the same line,
            for Python would show the stack of an import.
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
    if program == "-m":  # as long as Python imports the package of `python -m kmodels`
        program = sys.orig_argv[-len(sys.argv)]
    if Path(program).stem == "kmodels":
        print(f"kmodels: {line}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(line)


def choose_backend() -> None:
    """Sets KERAS_BACKEND where it is not set, unless Keras is imported and has its backend already.

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
    """Checks that Keras can be imported with the backend that is chosen.

    Raises:
        InputError: if KERAS_BACKEND names no backend of kmodels, or one that is not installed, or
            if no backend is installed.
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
    """Hides what a backend logs about itself while it is imported: a command says its own."""
    if os.environ.get(VARIABLE) == "tensorflow":
        from kmodels.core.framework_internals import log_lines_tensorflow

        log_lines_tensorflow.hide_information()


def installed_backends() -> list[str]:
    """Returns the installed ones of jax, torch and tensorflow, in this order."""
    return [name for name in BACKENDS if find_spec(name)]


def _keras_version() -> str | None:
    """Returns the version of the Keras that is imported or would be, or None."""
    if "keras" in sys.modules:
        return sys.modules["keras"].__version__
    for package in KERAS_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, which is all that its floor has."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _configured() -> str | None:
    """Returns the backend that `keras.json` names, or None where it names none."""
    folder = os.environ.get("KERAS_HOME")
    if folder is None:
        home = Path("~").expanduser()
        # Keras falls back to /tmp too. Only the name of a backend is read from there.
        shared = Path("/tmp")  # nosec B108
        folder = (home if os.access(home, os.W_OK) else shared) / ".keras"
    try:
        found = json.loads((Path(folder).expanduser() / "keras.json").read_text())
        return found.get("backend")
    except (OSError, ValueError, AttributeError):
        return None  # Keras takes its default for a file that cannot be read.
