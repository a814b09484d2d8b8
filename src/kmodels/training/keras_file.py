"""Weights and optimizer state out of a `.keras` file, such as one that Keras saved on torch.

`keras.models.load_model` builds what the file names, and on another backend it knows no torch
optimizer. Here the caller has the model, and of the file only the arrays are read.
"""

import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.errors import InputError
from kmodels.training import state

WEIGHTS = "model.weights.h5"
# Compressed beyond this an archive is not of weights.
_MOST_EXPANSION = 100


def load_keras_file(path: str | Path, model: keras.Model, optimizer: bool = True) -> None:
    """Fills a built model, and its optimizer, from a `.keras` file that any backend wrote.

    Nothing of the file is executed, and no class that it names is made: its configuration is not
    looked at.

    Args:
        path: of the file.
        model: of the same architecture, compiled where `optimizer` is true.
        optimizer: whether the optimizer's state is read too.

    Raises:
        InputError: for a file that is damaged or does not fit; the model is unchanged then.
    """
    path = Path(path).expanduser()
    wanted = list(model.variables)
    if optimizer:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        wanted += model.optimizer.variables
    with tempfile.TemporaryDirectory() as folder:
        file = _extract(path, Path(folder))
        _check(path, file, model, optimizer)
        former = [(variable, np.array(state.host_values(variable))) for variable in wanted]
        try:
            with warnings.catch_warnings():
                # Keras goes on without what does not fit, and only warns.
                warnings.simplefilter("error")
                model.load_weights(file)
        except Exception as error:
            for variable, values in former:
                state.put(variable, values)
            raise InputError(f"{path} does not fit the model: {_one_line(error)}") from None


def _extract(path: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(WEIGHTS)
            if entry.file_size > _MOST_EXPANSION * max(entry.compress_size, 1):
                raise InputError(
                    f"{path} claims to hold {entry.file_size:,} bytes of weights in "
                    f"{entry.compress_size:,}; save it again"
                )
            return Path(archive.extract(WEIGHTS, folder))
    except KeyError:
        raise InputError(f"{path} holds no {WEIGHTS}; save the model as a .keras file") from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a whole .keras file: {_one_line(error)}") from None


def _check(path: Path, file: Path, model: keras.Model, optimizer: bool) -> None:
    """Compares the number of the optimizer's variables, or puts the model's own in their place."""
    import h5py

    own = [] if model.optimizer is None else model.optimizer.variables
    try:
        with h5py.File(file, "r+") as held:
            saved: Any = held.get("optimizer/vars", ())
            count = len(saved)
            if not optimizer:
                # Keras loads what the file has for each part of a model, or fails.
                if "optimizer" in held:
                    del held["optimizer"]
                for number, variable in enumerate(own):
                    held[f"optimizer/vars/{number}"] = state.host_values(variable)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} has damaged weights: {_one_line(error)}") from None
    if optimizer and len(own) != count:
        raise InputError(
            f"{path} has {count} variables of an optimizer, the model's has {len(own)}; "
            "compile with the same optimizer, or give optimizer=False"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
