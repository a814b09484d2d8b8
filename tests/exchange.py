"""What the suite of one backend leaves for the tests that compare several of them.

A script is a file with `main(folder)` that writes there. Each backend runs it in its own suite, in
the process of the tests, since imports cost most; what was left nowhere is made when asked for.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from kmodels.core.files import atomic_directory

BACKENDS = ("jax", "torch", "tensorflow")


def load(script: Path) -> ModuleType:
    sys.path.insert(0, str(script.parent))
    try:
        return importlib.import_module(script.stem)
    finally:
        sys.path.remove(str(script.parent))


def leave(exchange: Path, backend: str, script: Path) -> Path:
    """The folder that the script filled in this process, on the running backend."""
    folder = exchange / backend / script.stem
    with atomic_directory(folder) as new:
        load(script).main(new)
    return folder


def find(exchange: Path, script: Path) -> dict[str, Path]:
    """The folder of each backend."""
    folders = {name: exchange / name / script.stem for name in BACKENDS}
    for name, folder in folders.items():
        if not folder.exists():
            environment = {**os.environ, "KERAS_BACKEND": name}
            with atomic_directory(folder) as new:
                command = [sys.executable, script, new]
                subprocess.run(command, env=environment, check=True, timeout=280)
    return folders
