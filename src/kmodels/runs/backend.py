"""The backend of a command or recipe, chosen before Keras is imported."""

import os
from pathlib import Path

from kmodels.core.errors import InputError

BACKENDS = ("jax", "torch", "tensorflow")


def check_backend() -> None:
    """Chooses an installed backend where none is named; raises `InputError` for a wrong one."""
    from importlib.util import find_spec

    name = os.environ.get("KERAS_BACKEND")
    installed = [backend for backend in BACKENDS if find_spec(backend)]
    if name is None:
        # Keras' own default is TensorFlow, which need not be there.
        if installed and "tensorflow" not in installed and not _keras_config().exists():
            os.environ["KERAS_BACKEND"] = installed[0]
    elif name not in BACKENDS:
        raise InputError(f"KERAS_BACKEND is {name!r}; choose one of {', '.join(BACKENDS)}")
    elif name not in installed:
        raise InputError(f"KERAS_BACKEND is {name!r}, which is not installed: pip install {name}")


def _keras_config() -> Path:
    return Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
