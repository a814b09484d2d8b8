"""keras-hub's names of the layers that LoRA adapts, and adapters in .lora.h5 files."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy, write_file
from kmodels.layers.adapter import LoraSettings, matrices
from kmodels.layers.changes import (
    adaptable_layers,
    adapters,
    copies,
    describe_rows,
    put_adapters,
    restore_rows,
    rows,
)
from kmodels.layers.kernels import ADAPTER
from kmodels.layers.rows import IDS, ROWS, shown
from kmodels.lora.modules import tables, trained_tables
from kmodels.weights import gather

# keras-hub's names of layers of attention and MLP, and those of kmodels.
NAMES = {
    "query_dense": "query",
    "key_dense": "key",
    "value_dense": "value",
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "attention_output": "output",
    "output_dense": "output",
    "out_proj": "output",
    "ffw_gating": "gate",
    "ffw_gating_2": "up",
    "ffw_linear": "down",
    "mlp_dense_1": "up",
    "mlp_dense_2": "down",
}
DEFAULT = ("query", "value")
ENDING = ".lora.h5"
# Of a file: settings and matrices by path of the layer, or ids and rows by path of the table.
Held = dict[str, tuple[Any, Any]]


def targets(given: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the targets of `enable_lora` for keras-hub's `target_layer_names`."""
    if isinstance(given, str):
        raise InputError(f"target_layer_names is {given!r}; give a list of names")
    return DEFAULT if given is None else tuple(dict.fromkeys(NAMES.get(n, n) for n in given))


def save(model: keras.Model, path: str | Path) -> None:
    """See `save_lora_weights`."""
    found = adapters(model)
    if not found:
        raise InputError("there are no lora-enabled layers in this model; call enable_lora first")
    if not str(path).endswith(ENDING):
        raise InputError(f"the filename must end in {ENDING}; it is {path}")
    if whole := [*(layer.path for layer in trained_tables(model)), *copies(model)]:
        raise InputError(
            f"{ENDING} files have no place for {whole[0]}, which is trained as a whole; use "
            "save_adapter or save_to_preset"
        )
    arrays = {x: [gather.values(v) for v in adapter.variables] for x, adapter in found.items()}
    trained = {x: (part.ids, gather.values(part.values)) for x, part in rows(model).items()}

    def write(part: Path) -> None:
        with h5py.File(part, "w") as file:
            for name, held in arrays.items():
                group = file.create_group(f"adapters/{name}")
                for key, value in _described(found[name].settings).items():
                    group.attrs[key] = value
                for part_name, array in zip(ADAPTER, held, strict=False):
                    group[part_name] = array
            for name, (ids, array) in trained.items():
                group = file.create_group(f"rows/{name}")
                group[IDS], group[ROWS] = np.array(ids, "int32"), array

    write_file(path, write)


def _described(settings: LoraSettings) -> dict[str, Any]:
    held = {name: getattr(settings, name) for name in ("rank", "dropout", "rslora", "dora")}
    return {**held, "alpha": settings.given_alpha}


def load(model: keras.Model, path: str | Path) -> None:
    """See `load_lora_weights`."""
    held, held_rows = _read(local_copy(path))
    layers, own = adaptable_layers(model), adapters(model)
    ends = tuple(sorted({name.rpartition("/")[2] for name in held}))
    settings = {
        name: LoraSettings(**_plain(described), targets=ends)
        for name, (described, _) in held.items()
    }
    problems = [f"{name} is not a linear layer here" for name in held if name not in layers]
    if own:
        problems += [f"{name} has an adapter only here" for name in own if name not in held]
        problems += [f"{name} has an adapter only there" for name in held if name not in own]
    for name, wanted in settings.items():
        if name in own and (rank := own[name].settings.rank) != wanted.rank:
            problems.append(
                f"{name} has rank {rank} here and {wanted.rank} there, and the ranks must match"
            )
        elif name in own and _described(own[name].settings) != _described(wanted):
            problems.append(f"{name} was enabled there with {_described(wanted)}")
        elif name in layers:
            shapes = [shape for shape, _ in matrices(layers[name], wanted.rank).values()]
            shapes += [(layers[name].units,)] if wanted.dora else []
            if [array.shape for array in held[name][1]] != shapes:
                problems.append(f"{name} has other sizes there")
    problems += _other_rows(model, held_rows, bool(own))
    if problems:
        raise InputError(f"{path} does not fit the model: {'; '.join(problems[:4])}")
    if not own:
        put_adapters(model, {name: (layers[name], settings[name]) for name in held})
        restore_rows(model, {name: ids for name, (ids, _) in held_rows.items()})
    for name, trained in rows(model).items():
        trained.values.assign(held_rows[name][1])
    for name, (_, arrays) in held.items():
        for variable, array in zip(layers[name].adapter.variables, arrays, strict=True):
            variable.assign(array)


def _other_rows(model: keras.Model, held: Held, enabled: bool) -> list[str]:
    """Returns the problems of the rows of a file, by path of their table, with a model."""
    here, there = describe_rows(model), {name: list(ids) for name, (ids, _) in held.items()}
    if enabled and here != there:
        sides = (shown(chain(*described.values())) or "none" for described in (here, there))
        return ["rows {} are trained here and {} there".format(*sides)]
    sizes = {name: (x.input_dim, x.output_dim) for name, x in tables(model).items()}
    return [
        f"{name} has other sizes there, or is no embedding table here"
        for name, (ids, array) in held.items()
        if name not in sizes
        or max(ids) >= sizes[name][0]
        or array.shape != (len(ids), sizes[name][1])
    ]


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "item", lambda v=value: v)() for key, value in described.items()}


def _read(path: Path) -> tuple[Held, Held]:
    """Returns the adapters and the trained rows of a file."""
    found: Held = {}
    found_rows: Held = {}
    if not path.is_file() or not h5py.is_hdf5(path):
        raise InputError(f"{path} is not a file of save_lora_weights")

    def note(name: str, group: "h5py.Group") -> None:
        if isinstance(group, h5py.Group) and ADAPTER[0] in group:
            arrays = [np.asarray(group[part]) for part in ADAPTER if part in group]
            found[name] = dict(group.attrs), arrays

    def note_rows(name: str, group: "h5py.Group") -> None:
        if isinstance(group, h5py.Group) and ROWS in group:
            found_rows[name] = np.asarray(group[IDS]).tolist(), np.asarray(group[ROWS])

    with h5py.File(path) as file:
        if "lora" in file:
            raise InputError(
                f"{path} is a file of keras-hub, which numbers layers; read it with "
                "kmodels.interop.keras_hub.read_lora(model, file)"
            )
        if "adapters" not in file:
            raise InputError(f"{path} is not a file of save_lora_weights")
        file["adapters"].visititems(note)
        if "rows" in file:
            file["rows"].visititems(note_rows)
    return found, found_rows
