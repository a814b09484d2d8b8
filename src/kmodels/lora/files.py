"""Adapters in files of PEFT's format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory
from kmodels.core.remote import local_copy, staged
from kmodels.layers import Dense, GroupedDense
from kmodels.lora import peft, peft_parameters, peft_vocabulary, seal
from kmodels.lora.adapter import Adapter, LoraSettings
from kmodels.lora.enable import adapters, put
from kmodels.lora.peft_vocabulary import lazy
from kmodels.lora.targets import adaptable_layers, expert_layers, linear_layers
from kmodels.lora.vocabulary import rows, trained_whole
from kmodels.weights import LazyArray, read_safetensors, write_safetensors
from kmodels.weights.native import WriteBy, refuse_to_replace
from kmodels.weights.readers import read_json, read_metadata

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
    heads = _heads(model)
    linear, experts = linear_layers(model), expert_layers(model)
    names = peft.names(model, [*linear, *experts])
    vocabulary, more = peft_vocabulary.described(model, save_embedding_layers)
    if nameless := [path for path in (*found, *heads) if path not in names]:
        raise InputError(
            f"transformers has no name for {', '.join(nameless[:8])}, so that PEFT would load "
            "nothing there; leave them out of enable_lora's targets, freeze heads, or use "
            "save_to_preset"
        )
    tensors = {}
    adapted = peft.in_order(model, [names[path] for path in found if path in experts])
    modules = peft_parameters.modules(adapted)
    for path, adapter in found.items():
        if path in experts:
            for part, array in _of_experts(adapter).items():
                tensors[f"{modules[names[path]]}.{part}"] = array
            continue
        for variable, part in zip(adapter.variables, peft.PARTS, strict=False):
            tensors[f"{names[path]}.{part}"] = lazy(variable, transposed=part != peft.PARTS[2])
    for path, layer in heads.items():
        tensors[f"{names[path]}.weight"] = lazy(layer.kernel, transposed=True)
        if layer.bias is not None:
            tensors[f"{names[path]}.bias"] = lazy(layer.bias)
    tensors |= vocabulary
    config = peft.config(
        {names[path]: adapter.settings for path, adapter in found.items()},
        others=[
            *(names[path] for path in linear if path in names and path not in found),
            *peft.outside_blocks(model),
        ],
        heads=[*(names[path] for path in heads), *more.pop("modules_to_save", [])],
        experts=[names[path] for path in experts if path in names],
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


def _of_experts(adapter: Adapter) -> dict[str, LazyArray]:
    """Returns the two matrices of experts by part, as PEFT lays them side by side."""
    layer, found = adapter.layer, {}
    sizes = peft_parameters.shapes(layer, adapter.settings.rank)
    for place, (variable, shape) in enumerate(zip(adapter.variables, sizes, strict=True)):
        change = partial(peft_parameters.to_file, first=place == 0)
        found[peft.PARTS[place]] = lazy(variable).map(shape, change)
    return found


def _heads(model: keras.Model) -> dict[str, Dense]:
    """Returns the linear layers that are trained as a whole beside the adapters."""
    layers = linear_layers(model)
    heads = {
        path: layer
        for path, layer in layers.items()
        if layer.adapter is None and layer.kernel is not None and layer.kernel.trainable
    }
    held = {id(v) for layer in heads.values() for v in layer.weights}
    held |= {id(v) for adapter in adapters(model).values() for v in adapter.variables}
    held |= {id(trained.values) for trained in rows(model).values()}
    held |= {id(layer.embeddings) for layer in trained_whole(model)}
    if lost := [v.path for v in model.trainable_weights if id(v) not in held]:
        raise InputError(
            f"an adapter file has no place for the trained {', '.join(lost[:8])}; freeze them or "
            "use save_to_preset"
        )
    return heads


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
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise InputError(
                f"{directory} holds no {name}; give a directory written by PEFT or save_adapter"
            )
    if adapters(model, merged=True):
        raise InputError("the model has merged adapters; call unmerge_lora before load_adapter")
    described = peft.settings(read_json(directory / CONFIG), directory)
    tensors = read_safetensors(directory / WEIGHTS)
    arrays = {name: tensor.read() for name, tensor in tensors.items()}
    seal.verify(read_metadata(directory / WEIGHTS), described, arrays, directory)
    vocabulary, problems = peft_vocabulary.read(model, arrays, described)
    linear = {name: array for name, array in arrays.items() if name not in vocabulary.names}
    chosen, filled, more = _match(model, linear, described)
    if problems := [*problems, *more]:
        raise InputError(f"{directory} does not fit the model: {'; '.join(problems)}")
    backbone = getattr(model, "backbone", model)
    for part in (*adapters(model).values(), *rows(model).values()):
        part.remove()
    put(backbone, chosen)
    vocabulary.put()
    for path, parts in filled.items():
        layer = adaptable_layers(model)[path]
        for part, array in parts.items():
            if isinstance(layer, GroupedDense):
                first = part == peft.PARTS[0]
                array = peft_parameters.from_file(array, first, layer.groups)
            else:
                array = array.T
            _variable(layer, part).assign(np.ascontiguousarray(array, "float32"))


def _variable(layer: Dense | GroupedDense, part: str) -> Any:
    heads = {"weight": layer.kernel, "bias": layer.bias}
    if part in heads:
        return heads[part]
    held: dict[str, Any] = dict(zip(peft.PARTS, layer.adapter.variables, strict=False))
    return held[part]


Filled = dict[str, dict[str, np.ndarray]]


def _match(
    model: keras.Model, arrays: Mapping[str, np.ndarray], described: peft.Described
) -> tuple[dict[str, tuple[Any, LoraSettings]], Filled, list[str]]:
    """Returns layers with their settings, arrays by layer and part, and what is wrong."""
    layers = adaptable_layers(model)
    paths = peft.paths(model, layers)
    tensors = peft.in_order(model, peft.paths(model, expert_layers(model)))
    experts = peft_parameters.named(tensors, tuple(described.settings.target_parameters))
    settings: dict[str, LoraSettings] = {}
    filled: Filled = {}
    unknown: list[str] = []
    for name, array in arrays.items():
        module, part = peft.split(name)
        module = experts.get(module, module)
        if part is None or module not in paths:
            unknown.append(name)
        else:
            filled.setdefault(paths[module], {})[part] = array
            settings[paths[module]] = described.of(module)
    problems = (
        [f"{len(unknown)} tensors without a layer: {', '.join(unknown[:8])}"] if unknown else []
    )
    chosen = {}
    for path, parts in filled.items():
        layer = layers[path]
        if any(part in parts for part in peft.PARTS):
            chosen[path] = (layer, settings[path])
        problems += _problems(path, layer, parts, settings[path] if path in chosen else None)
    if not chosen and not problems:
        problems.append("it holds no adapters")
    return chosen, filled, problems


def _problems(
    path: str,
    layer: Dense | GroupedDense,
    parts: Mapping[str, np.ndarray],
    settings: LoraSettings | None,
) -> Sequence[str]:
    """Returns what is wrong with one layer's arrays; without settings it is trained whole."""
    if settings is None:
        wanted = {} if layer.kernel is None else {"weight": (layer.units, layer.input_dim)}
        wanted |= {} if layer.bias is None else {"bias": (layer.units,)}
    elif isinstance(layer, GroupedDense):
        sizes = peft_parameters.shapes(layer, settings.rank)
        wanted = dict(zip(peft.PARTS, sizes, strict=False))
    else:
        wanted = {
            peft.PARTS[0]: (settings.rank, layer.input_dim),
            peft.PARTS[1]: (layer.units, settings.rank),
        }
        wanted |= {peft.PARTS[2]: (layer.units,)} if settings.dora else {}
    found = [f"{path} has no {part}" for part in wanted if part not in parts]
    found += [f"{path} has no place for {part}" for part in parts if part not in wanted]
    return found + [
        f"{path}'s {part} is {parts[part].shape}, the model needs {shape}"
        for part, shape in wanted.items()
        if part in parts and parts[part].shape != shape
    ]
