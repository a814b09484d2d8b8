"""Adapters in files of PEFT's format."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory
from kmodels.core.remote import local_copy, staged
from kmodels.core.schema import read_json
from kmodels.layers import GroupedDense
from kmodels.lora import peft, peft_parameters, peft_vocabulary, saved_modules, seal
from kmodels.lora.adapter import Adaptable, Adapter, LoraSettings
from kmodels.lora.enable import adapters, beside, put
from kmodels.lora.peft_vocabulary import lazy
from kmodels.lora.targets import adaptable_layers, expert_layers, is_lookup, linear_layers
from kmodels.lora.vocabulary import rows, tables
from kmodels.weights import LazyArray, write_safetensors
from kmodels.weights.native import WriteBy, refuse_to_replace
from kmodels.weights.readers import read_metadata, read_tensors

STEM = "adapter_model"
CONFIG, WEIGHTS = "adapter_config.json", f"{STEM}.safetensors"


def save_adapter(
    model: keras.Model,
    directory: str | Path,
    write_by: WriteBy = lambda tensors, write: write(tensors),
    save_embedding_layers: bool | str = "auto",
) -> Path:
    """Writes the adapters, and a trained head, to a directory that PEFT and `load_adapter` read.

    A hash in the file's header lets `load_adapter` refuse what was changed since.

    Args:
        model: a backbone or task with adapters.
        directory: to make or replace, local or an address.
        write_by: calls what writes the tensors that it is given, in one of several processes.
        save_embedding_layers: whether a frozen embedding table is written as well; "auto" where it
            was resized.

    Raises:
        InputError: without adapters, for a layer that has no name in transformers, or where
            something trained is neither an adapter nor a head nor of the embedding table.
    """
    found = adapters(model)
    if not found:
        hint = "; call unmerge_lora first" if adapters(model, merged=True) else ""
        raise InputError(f"save_adapter found no LoRA adapters{hint or '; call enable_lora first'}")
    saved, modules = _trained_modules(model), saved_modules.modules(model)
    linear, experts = linear_layers(model), expert_layers(model)
    names = peft.names(model, [*linear, *experts, *modules])
    vocabulary, more = peft_vocabulary.described(model, save_embedding_layers)
    if nameless := [path for path in (*found, *saved) if path not in names]:
        raise InputError(
            f"transformers has no name for {', '.join(nameless[:8])}, so that PEFT would load "
            "nothing there; leave them out of enable_lora's targets, freeze heads, or use "
            "save_to_preset"
        )
    tensors = {}
    adapted = peft.in_order(model, [names[path] for path in found if path in experts])
    of_experts = peft_parameters.modules(adapted)
    for path, adapter in found.items():
        if path in experts:
            for part, array in _of_experts(adapter).items():
                tensors[f"{of_experts[names[path]]}.{part}"] = array
            continue
        for variable, part in zip(adapter.variables, _parts(adapter.layer), strict=False):
            tensors[f"{names[path]}.{part}"] = lazy(variable, transposed=part != peft.PARTS[2])
    for path, parts in saved.items():
        within = f"{names[path]}{peft.INNER if path in found else ''}"
        for part, variable in parts.items():
            tensors[f"{within}.{part}"] = lazy(variable, modules[path].transposed(part))
    heads = {names[path] for path, parts in saved.items() if saved_modules.WEIGHT in parts}
    _check_ends(heads, names.values())
    tensors |= vocabulary
    config = peft.config(
        {names[path]: adapter.settings for path, adapter in found.items()},
        others=[
            *(names[path] for path in linear if path in names and path not in found),
            *peft.outside_blocks(model),
        ],
        heads=[*heads, *more.pop("modules_to_save", [])],
        experts=[names[path] for path in experts if path in names],
        biases=[names[path] for path in saved if names[path] not in heads],
    )
    config |= more

    with staged(directory) as (target, finish):

        def write(held: Mapping[str, LazyArray]) -> Path:
            refuse_to_replace(target, (CONFIG, WEIGHTS, "README.md"))
            with atomic_directory(target) as folder:
                text = json.dumps(config, indent=2, sort_keys=True) + "\n"
                (folder / CONFIG).write_text(text, encoding="utf-8")
                arrays = {name: tensor.read() for name, tensor in held.items()}
                digest = seal.digest(peft.settings(config, target), arrays)
                read = {
                    name: replace(held[name], read=lambda array=array: array)
                    for name, array in arrays.items()
                }
                write_safetensors(folder / WEIGHTS, read, {"format": "pt", seal.KEY: digest})
            return finish(target)

        return write_by({peft.PREFIX + name: tensor for name, tensor in tensors.items()}, write)


def _check_ends(heads: Collection[str], names: Iterable[str]) -> None:
    """Raises InputError if PEFT would take the name of a saved module for others too."""
    for name in sorted(heads):
        if others := [x for x in names if x.endswith(name) and x not in heads]:
            raise InputError(
                f"PEFT would take {name} of modules_to_save for {others[0]} too; save the adapter "
                "of a model with its head, whose names are longer, or use save_to_preset"
            )


def _of_experts(adapter: Adapter) -> dict[str, LazyArray]:
    """Returns the two matrices of experts by part, as PEFT lays them side by side."""
    layer, found = adapter.layer, {}
    sizes = peft_parameters.shapes(layer, adapter.settings.rank)
    for place, (variable, shape) in enumerate(zip(adapter.variables, sizes, strict=True)):
        change = partial(peft_parameters.to_file, first=place == 0)
        found[peft.PARTS[place]] = lazy(variable).map(shape, change)
    return found


def _trained_modules(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Returns the variables trained beside the adapters and the table, by module and part."""
    found = saved_modules.trained(model)
    held = {id(v) for parts in found.values() for v in parts.values()}
    held |= {id(v) for adapter in adapters(model).values() for v in adapter.variables}
    held |= {id(trained.values) for trained in rows(model).values()}
    if lost := [v.path for v in model.trainable_weights if id(v) not in held]:
        raise InputError(
            f"an adapter file has no place for the trained {', '.join(lost[:8])}; freeze them or "
            "use save_to_preset"
        )
    return {path: parts for path, parts in found.items() if path not in tables(model)}


def load_adapter(model: keras.Model, directory: str | Path) -> None:
    """Puts the adapters of a file into a model; rank, alpha and targets come from the file.

    All is read and compared first; the model changes only if everything fits. Adapters that the
    model has give way. A changed bit is found in what `save_adapter` wrote; other packages' files
    have no hash to compare with.

    Args:
        model: a backbone or task.
        directory: with adapter_config.json and adapter_model.safetensors.

    Raises:
        InputError: lists all that does not fit; or the directory is damaged, or the model has
            merged adapters.
    """
    directory = local_copy(directory)
    if not (directory / CONFIG).is_file():
        raise InputError(
            f"{directory} holds no {CONFIG}; give a directory written by PEFT or save_adapter"
        )
    if adapters(model, merged=True):
        raise InputError("the model has merged adapters; call unmerge_lora before load_adapter")
    described = peft.settings(read_json(directory / CONFIG), directory)
    arrays = {name: tensor.read() for name, tensor in read_tensors(directory, STEM).items()}
    if (directory / WEIGHTS).is_file():
        seal.verify(read_metadata(directory / WEIGHTS), described, arrays, directory)
    arrays = peft.without_adapter_name(arrays, directory)
    vocabulary, problems = peft_vocabulary.read(model, arrays, described)
    others = {name: array for name, array in arrays.items() if name not in vocabulary.names}
    fit = _match(model, others, described)
    if problems := [*problems, *fit.problems]:
        raise InputError(f"{directory} does not fit the model: {'; '.join(problems)}")
    backbone = getattr(model, "backbone", model)
    for part in (*adapters(model).values(), *beside(model)):
        part.remove()
    put(backbone, fit.chosen)
    vocabulary.put()
    frozen = _frozen_outputs(fit.modules, described)
    saved_modules.put((fit.modules[path], part) for path, part in fit.saved if path not in frozen)
    for path, parts in fit.adapters.items():
        layer = fit.chosen[path][0]
        held: dict[str, Any] = dict(zip(_parts(layer), layer.adapter.variables, strict=False))
        for part, array in parts.items():
            if isinstance(layer, GroupedDense):
                first = part == peft.PARTS[0]
                array = peft_parameters.from_file(array, first, layer.groups)
            else:
                array = array.T
            held[part].assign(np.ascontiguousarray(array, "float32"))
    for (path, part), array in fit.saved.items():
        module = fit.modules[path]
        array = array.T if module.transposed(part) else array
        module.variable(part).assign(np.ascontiguousarray(array, "float32"))


@dataclass(frozen=True)
class _Fit:
    """The match of the tensors of a file with a model.

    Args:
        modules: modules of the model that may be trained as a whole, by path.
        chosen: layers that get an adapter, with its settings, by path.
        adapters: arrays by path and part of the adapter.
        saved: arrays of modules that are trained as a whole, or by their bias, by path and part.
        problems: what does not fit.
    """

    modules: Mapping[str, saved_modules.Module]
    chosen: dict[str, tuple[Any, LoraSettings]] = field(default_factory=dict)
    adapters: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    saved: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _match(model: keras.Model, arrays: Mapping[str, np.ndarray], described: peft.Described) -> _Fit:
    """Returns which layers and modules the tensors of a file are for, and what is wrong."""
    layers, modules = adaptable_layers(model), saved_modules.modules(model)
    fit = _Fit(modules)
    paths = peft.paths(model, {**layers, **modules})
    tensors = peft.in_order(model, peft.paths(model, expert_layers(model)))
    experts = peft_parameters.named(tensors, tuple(described.settings.target_parameters))
    unknown: list[str] = []
    named: dict[str, str] = {}
    for name, array in arrays.items():
        module, part = peft.split(name)
        module = experts.get(module, module)
        path = paths.get(module, "")
        if path in layers and part in _parts(layers[path]):
            named[path] = module
            fit.adapters.setdefault(path, {})[part] = array
        elif part is not None and path in modules and part in modules[path].attributes:
            fit.saved[path, part] = array
        else:
            unknown.append(name)
    settings = described.of(named.values())
    # In the order of the model: the two tables of an embedding have their variables in one layer.
    fit.chosen.update({x: (layers[x], settings[named[x]]) for x in layers if x in named})
    if of_tables := [name for name in unknown if ".lora_" in name and peft.is_table(name)]:
        fit.problems.append(
            "LoRA matrices of an embedding table that is the output layer too are not supported "
            f"({of_tables[0]}); train it whole, by modules_to_save"
        )
    elif unknown:
        fit.problems.append(f"{len(unknown)} tensors without a layer: {', '.join(unknown[:8])}")
    for path, parts in fit.adapters.items():
        fit.problems.extend(_misfits(path, _shapes(*fit.chosen[path]), parts))
    for path, module in modules.items():
        parts = {
            part: fit.saved[path, part] for part in module.attributes if (path, part) in fit.saved
        }
        shapes = {part: module.shape(part) for part in module.attributes}
        if saved_modules.WEIGHT not in parts:
            shapes = {part: shapes[part] for part in parts}
        elif path in fit.chosen and path not in _frozen_outputs(modules, described):
            fit.problems.append(f"{path} has an adapter and is in modules_to_save")
        fit.problems.extend(_misfits(path, shapes, parts))
    looked_up = [path for path, (layer, _) in fit.chosen.items() if is_lookup(layer)]
    if described.token_ids is not None and looked_up:
        fit.problems.append(
            f"it has both LoRA matrices and trained rows of {looked_up[0]}; write one of them"
        )
    if not fit.chosen and not fit.problems:
        fit.problems.append("it holds no adapters")
    return fit


def _frozen_outputs(
    modules: Mapping[str, saved_modules.Module], described: peft.Described
) -> list[str]:
    """Returns output layers that a file may hold as a base, which replaces that of the model."""
    if any(name.rpartition(".")[2] == saved_modules.HEAD for name in described.tables):
        return []
    return [path for path in modules if path.endswith(saved_modules.TABLES[1])]


def _parts(layer: Adaptable) -> tuple[str, ...]:
    """Returns the ends of the names of an adapter's tensors in a file."""
    return peft.PARTS_OF_TABLE if is_lookup(layer) else peft.PARTS


def _shapes(layer: Adaptable, settings: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an adapter's arrays in a file, by part."""
    if isinstance(layer, GroupedDense):
        return dict(zip(peft.PARTS, peft_parameters.shapes(layer, settings.rank), strict=False))
    first, second, lengths = _parts(layer)
    shapes: dict[str, tuple[int, ...]] = {
        first: (settings.rank, layer.input_dim),
        second: (layer.units, settings.rank),
    }
    return shapes | ({lengths: (layer.units,)} if settings.dora else {})


def _misfits(
    path: str, wanted: Mapping[str, tuple[int, ...]], parts: Mapping[str, np.ndarray]
) -> list[str]:
    """Returns the problems of the arrays of one adapter or module."""
    if not parts:
        return []
    found = [f"{path} has no {part}" for part in wanted if part not in parts]
    found += [f"{path} has no place for {part}" for part in parts if part not in wanted]
    return found + [
        f"{path}'s {part} is {parts[part].shape}, the model needs {shape}"
        for part, shape in wanted.items()
        if part in parts and parts[part].shape != shape
    ]
