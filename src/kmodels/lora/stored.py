"""Checks that a .weights.h5 file, as Keras writes it, fits a model."""

from pathlib import Path

import h5py
import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import kernels, rows
from kmodels.lora.targets import expert_layers, linear_layers
from kmodels.lora.vocabulary import tables

SHOWN = 4


def check(model: keras.Model, path: str | Path) -> None:
    """Compares the kernels, adapters and shapes of a model with those in a .weights.h5.

    Keras would stop in the middle, and list objects over many lines.

    Args:
        model: a built model.
        path: path of the file; one that is not there, or of another kind, is left to Keras.

    Raises:
        InputError: names what does not fit, in one line.
    """
    if not str(path).endswith(".h5") or not Path(path).is_file() or not h5py.is_hdf5(path):
        return
    saved = keras_internals.saved_arrays(model)
    groups = {id(variable): name.rpartition("/")[0] for name, variable in saved.items()}
    problems, seen = [], set()
    with h5py.File(path) as file:
        for layer in (*linear_layers(model).values(), *expert_layers(model).values()):
            group = groups[id(next(iter(kernels.base(layer).values())))]
            seen.add(group)
            if group in file and (problem := kernels.misfit(layer, file[group])):
                problems.append(f"{layer.path}: {problem}")
        for layer in tables(model).values():
            group = groups[id(layer.embeddings)]
            seen.add(group)
            if group in file and (problem := rows.misfit(layer, file[group])):
                problems.append(f"{layer.path}: {problem}")
        for name, variable in saved.items():
            if name in file and name.rpartition("/")[0] not in seen:
                here, there = tuple(getattr(variable, "shape", ())), tuple(file[name].shape)
                if here != there:
                    problems.append(f"{variable.path} is {here}, in the file {there}")
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InputError(
            f"{path} does not fit the model: {'; '.join(problems[:SHOWN])}{more}; make the model "
            "as it was when it was saved, or use save and keras.saving.load_model"
        )
