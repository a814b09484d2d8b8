"""The choice of Keras' backend, made once for `import kmodels`, the command, recipes and notebooks.

Keras reads KERAS_BACKEND when it is imported, and nothing changes its backend after that. So the
choice is made before, by `import kmodels`, in this order:

1. KERAS_BACKEND, if it is set.
2. The backend in `keras.json`, if that backend is installed. Keras writes this file by itself, with
   `tensorflow` in it, when it is first imported, whether TensorFlow is there or not.
3. The first of jax, torch and tensorflow that is installed. A line on stderr says which.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from kmodels.core.errors import InputError

BACKENDS = ("jax", "torch", "tensorflow")
VARIABLE = "KERAS_BACKEND"


def choose_backend() -> None:
    """Sets KERAS_BACKEND where it is not set, unless Keras is imported and has its backend already.

    It raises nothing: a wrong name is for `check_backend` to tell, in a line.
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


def installed_backends() -> list[str]:
    """Returns the installed ones of jax, torch and tensorflow, in this order."""
    return [name for name in BACKENDS if find_spec(name)]


def _configured() -> str | None:
    """Returns the backend that `keras.json` names, or None where it names none."""
    folder = os.environ.get("KERAS_HOME")
    if folder is None:
        home = Path("~").expanduser()
        # Keras falls back to /tmp in the same way.
        folder = (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"
    try:
        found = json.loads((Path(folder).expanduser() / "keras.json").read_text())
        return found.get("backend")
    except (OSError, ValueError, AttributeError):
        return None  # Keras takes its default for a file that cannot be read.
