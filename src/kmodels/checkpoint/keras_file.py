"""Weights and optimizer state out of a `.keras` file, such as one that Keras saved on torch.

`keras.models.load_model` builds what the file names, and on another backend it has no torch
optimizer. Here the caller has the model, and of the file only the arrays are read. Keras itself
never opens the file: matching arrays go into a file that Keras has just written for the model.
"""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint import state
from kmodels.core.arguments import checked
from kmodels.core.errors import InputError, one_line
from kmodels.core.files import check_zip, hdf5_arrays
from kmodels.core.remote import local_copy

WEIGHTS = "model.weights.h5"
OPTIMIZER = "optimizer/"


@checked
def load_keras_file(path: str | Path, model: keras.Model, optimizer: bool = True) -> None:
    """Fills a built model, and its optimizer, from a `.keras` file that any backend wrote.

    Nothing of the file is executed, no class that it names is made, and no other file that it
    points to is opened: its configuration is not looked at. The file has no checksum of its own,
    so values that were changed, or swapped between arrays of one shape, cannot be noticed.

    Args:
        path: path of the file.
        model: a model of the same architecture, compiled if `optimizer` is True.
        optimizer: reads the optimizer's state too.

    Raises:
        InputError: for a file that is damaged or does not fit, with a list of the arrays that are
            missing, superfluous or of another shape; the model is unchanged then.
    """
    path = local_copy(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}; give one that model.save wrote")
    wanted = list(model.variables)
    if optimizer:
        wanted += state.built_optimizer(model).variables
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "own.weights.h5"
        model.save_weights(own)
        file = _extract(path, Path(folder))
        try:
            _move(path, file, own, optimizer)
        except InputError:
            raise
        except Exception as error:
            # HDF5 raises nearly anything for a damaged file: OSError, RuntimeError, KeyError.
            raise InputError(f"{path} has damaged weights: {one_line(error)[:300]}") from None
        former = [(variable, np.array(state.host_values(variable))) for variable in wanted]
        try:
            model.load_weights(own)
        except Exception as error:
            for variable, values in former:
                state.put(variable, values)
            raise InputError(f"{path} does not fit the model: {one_line(error)[:300]}") from None


def _extract(path: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path)
            archive.getinfo(WEIGHTS)
            return Path(archive.extract(WEIGHTS, folder))
    except KeyError:
        raise InputError(f"{path} holds no {WEIGHTS}; save the model as a .keras file") from None
    except InputError:
        raise
    except Exception as error:
        # zipfile raises nearly anything for a damaged file: zlib.error, RuntimeError, EOFError.
        raise InputError(f"{path} is not a whole .keras file: {one_line(error)[:300]}") from None


def _move(path: Path, file: Path, own: Path, optimizer: bool) -> None:
    """Replaces the model's own arrays by those of the file, if all of them fit."""
    import h5py

    with h5py.File(file, "r") as theirs, h5py.File(own, "r+") as ours:
        wanted = dict(hdf5_arrays(ours, own))
        stored = dict(hdf5_arrays(theirs, path, 1000 + 20 * len(wanted)))
        counts = [sum(name.startswith(OPTIMIZER) for name in names) for names in (stored, wanted)]
        if not optimizer:
            stored, wanted = (
                {name: array for name, array in arrays.items() if not name.startswith(OPTIMIZER)}
                for arrays in (stored, wanted)
            )
        elif counts[0] != counts[1]:
            raise InputError(
                f"{path} has {counts[0]} variables of an optimizer, the model's has {counts[1]}; "
                "compile with the same optimizer, or give optimizer=False"
            )
        if problems := list(state.misfits(stored, wanted)):
            raise InputError(f"{path} does not fit the model: {state.shortened(problems)}")
        for name in wanted:
            values = stored[name][()]
            del ours[name]
            written: Any = ours.create_dataset(name, data=values)
            if written.dtype.kind == "V":
                written.attrs["dtype"] = "bfloat16"
