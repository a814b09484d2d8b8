"""Weights and optimizer state in Orbax's format, for other programs on JAX.

`kmodels.callbacks.Checkpoint` does not need it: its own files hold the same parts, are verified by
hash, and are read without JAX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import keras

from kmodels.checkpoint import state
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.core.processes import all_or_raise

# By part of the checkpoint and path.
Variables = Mapping[str, Mapping[str, keras.Variable]]


class OrbaxBackend(Protocol):
    """Orbax's format, on the backend that has it."""

    def save(self, path: Path, variables: Variables) -> None:
        """Writes the values of these variables to a new directory."""
        ...

    def load(self, path: Path, variables: Variables) -> None:
        """Fills these variables, all or none; raises `InputError` for misfits."""
        ...


_orbax = backend_module("kmodels.checkpoint.orbax", OrbaxBackend, optional=True)


def save_orbax(model: keras.Model, directory: str | Path) -> Path:
    """Writes {"model": {path: weight}, "optimizer": {path: slot}} as Orbax does.

    In a run of several processes all call it, and each writes the parts that it holds.

    Args:
        model: compiled.
        directory: a new directory, on a disk that all processes see.

    Raises:
        InputError: on another backend, without Orbax, or if the directory exists.
    """
    path = local_path(directory).resolve()
    module = _module()
    all_or_raise("Orbax begins", lambda: _check_new(path))
    module.save(path, _variables(model))
    return path


def load_orbax(model: keras.Model, directory: str | Path) -> None:
    """Fills a compiled model and its optimizer from files of `save_orbax`, on any mesh.

    Args:
        model: compiled as the one that was saved.
        directory: directory of `save_orbax`.

    Raises:
        InputError: on another backend, without Orbax, for a directory that Orbax did not write, or
            with a list of all misfits; nothing is filled then.
    """
    _module().load(local_path(directory).resolve(), _variables(model))


def _variables(model: keras.Model) -> Variables:
    parts = state.parts(model, False)
    return {part: parts[part] for part in ("model", "optimizer")}


def _check_new(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists; give a new directory")


def _module() -> OrbaxBackend:
    if _orbax is None:
        raise InputError(
            f"Orbax needs the jax backend, and this is {backend()}; checkpoints of "
            "kmodels.callbacks.Checkpoint are read on every backend"
        )
    return _orbax
