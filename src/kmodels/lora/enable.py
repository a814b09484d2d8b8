"""Adapters on a whole model: on, merged, off."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.layers import Dense
from kmodels.lora import peft, saved_modules, vocabulary
from kmodels.lora.adapter import Adaptable, Adapter, LoraSettings
from kmodels.lora.targets import (
    adaptable_layers,
    choose,
    choose_experts,
    expert_layers,
    is_lookup,
)
from kmodels.weights import gather


def adapters(model: keras.Model, merged: bool = False) -> dict[str, Adapter]:
    """Returns the adapters by path of their layer; with `merged` those that were merged."""
    name = "merged" if merged else "adapter"
    found = {path: getattr(layer, name) for path, layer in adaptable_layers(model).items()}
    return {path: adapter for path, adapter in found.items() if adapter is not None}


def enable(
    model: keras.Model,
    settings: LoraSettings,
    trainable_token_indices: vocabulary.Ids | None = None,
    modules_to_save: Sequence[str] | None = None,
) -> None:
    """Freezes a model and puts adapters beside the chosen layers.

    Args:
        model: a built model.
        settings: rank, targets and so on.
        trainable_token_indices: rows of the embedding table that are trained, see `enable_lora`.
        modules_to_save: modules that are trained as a whole; they get no adapter.

    Raises:
        InputError: for unknown targets or tokens, or a model that has adapters.
    """
    if adapters(model) or adapters(model, merged=True):
        raise InputError("this model has LoRA adapters already; make a new one to start over")
    saved = vocabulary.modules_named(model, modules_to_save)
    layers = {path: x for path, x in chosen(model, settings).items() if path not in saved}
    if not layers:
        raise InputError("modules_to_save names all targets; leave some of them to the adapters")
    begin = vocabulary.choose(model, trainable_token_indices, modules_to_save)
    looked_up = [path for path, layer in layers.items() if is_lookup(layer)]
    if trainable_token_indices is not None and looked_up:
        raise InputError(
            f"{looked_up[0]} is a target, so trainable_token_indices would train its rows twice; "
            "leave one of the two out"
        )
    warn_of_rank(layers, settings.rank)
    put(model, {path: (layer, settings) for path, layer in layers.items()})
    begin()


def chosen(model: keras.Model, settings: LoraSettings) -> dict[str, Adaptable]:
    """Returns the layers that get an adapter, by path.

    Raises:
        InputError: for unknown targets.
    """
    names = peft.names(model, expert_layers(model))
    experts = choose_experts(model, settings.target_parameters, names)
    return {**choose(model, settings.targets), **experts}


def put(
    model: keras.Model, chosen: Mapping[str, tuple[Any, LoraSettings]], freeze: bool = True
) -> None:
    """Freezes a model and gives each chosen layer an adapter of its own settings."""
    for variable in model.weights if freeze else ():
        variable.trainable = False
    for layer, settings in chosen.values():
        layer.adapter = Adapter(layer, settings)


def adapt(layer: Dense, rank: int, alpha: float | None) -> list[Any]:
    """Gives one layer an adapter and freezes its kernel; the two matrices are returned."""
    settings = LoraSettings(rank, alpha, targets=(layer.name,))
    warn_of_rank({layer.path: layer}, rank)
    layer.adapter = Adapter(layer, settings)
    if layer.kernel is not None:
        layer.kernel.trainable = False
    return layer.adapter.variables


def warn_of_rank(layers: Mapping[str, Adaptable], rank: int) -> None:
    """Warns of a rank that no product of the two matrices has; it costs numbers and gains none."""
    limits = {path: min(layer.input_dim, layer.units) for path, layer in layers.items()}
    if not (narrow := [path for path, limit in limits.items() if rank > limit]):
        return
    more = f" and {len(narrow) - 1} more" if narrow[1:] else ""
    warnings.warn(
        f"LoRA rank {rank} is above {limits[narrow[0]]}, the smaller side of {narrow[0]}{more}; a "
        "rank up to there can learn as much",
        stacklevel=4,
    )


@contextmanager
def disabled(model: keras.Model) -> Iterator[None]:
    """Has the model give what its frozen base gives, inside the block.

    `fit`, `evaluate`, `predict` and `generate` follow it, in and out of the block. A function that
    you compile yourself does not: enter the block within it.

    Args:
        model: with adapters.

    Raises:
        InputError: without adapters, or if the whole embedding table is trained in place.
    """
    found, rows, copies = adapters(model), vocabulary.rows(model), saved_modules.copies(model)
    if not found:
        raise InputError("disabled found no LoRA adapters; call enable_lora first")
    if whole := [x for x in vocabulary.trained_whole(model) if x.copies is None]:
        raise InputError(
            f"{whole[0].path} is trained in place, so the table as it was is gone; give its name "
            "to modules_to_save of enable_lora, which keeps it"
        )
    try:
        for adapter in found.values():
            adapter.layer.adapter = None
        for held in rows.values():
            held.layer.rows = None
        for held in copies.values():
            held.off()
        yield
    finally:
        for adapter in found.values():
            adapter.layer.adapter = adapter
        for held in rows.values():
            held.layer.rows = held
        for held in copies.values():
            held.on()


def beside(model: keras.Model, merged: bool = False) -> list[Any]:
    """Returns the trained rows and copies beside the adapters; with `merged` those merged."""
    rows, copies = vocabulary.rows(model, merged), saved_modules.copies(model, merged)
    return [*rows.values(), *copies.values()]


def merge(model: keras.Model) -> None:
    """Adds every adapter to its kernel, and writes trained rows and copies into the originals.

    The model then has the variables it had without LoRA.

    Raises:
        InputError: without adapters, or on a quantized base.
    """
    found = adapters(model)
    if not found:
        raise InputError("merge_lora found no adapters; call enable_lora or load_adapter first")
    copied = saved_modules.copies(model).values()
    trained = [*found.values(), *(held for held in copied if None in held.originals.values())]
    quantized = [held.layer for held in trained if held.layer.quantized is not None]
    if quantized:
        raise InputError(
            f"merge_lora would round the adapter away, since {quantized[0].path} and "
            f"{len(quantized) - 1} more are quantized to {quantized[0].quantized.mode}; load the "
            "base in full precision, then load_adapter and merge_lora"
        )
    for part in (*found.values(), *beside(model)):
        part.merge()


def unmerge(model: keras.Model) -> None:
    """Undoes `merge`, bit for bit.

    Raises:
        InputError: where nothing was merged.
    """
    found = adapters(model, merged=True)
    if not found:
        raise InputError(
            "unmerge_lora found no merged adapters: none were merged since this model was made, "
            "and a file holds the merged kernels alone; load what was saved before merge_lora"
        )
    for part in (*found.values(), *beside(model, merged=True)):
        part.unmerge()


def is_merged(model: keras.Model) -> bool:
    """Returns whether adapters were added to the kernels of a model."""
    return bool(adapters(model, merged=True))


def describe(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Returns the settings of each adapter by path of its layer; empty without LoRA."""
    return {path: adapter.settings.to_dict() for path, adapter in adapters(model).items()}


def restore(
    model: keras.Model, description: Mapping[str, Mapping[str, Any]], freeze: bool = True
) -> None:
    """Gives a new model the adapters of `describe`, to be filled from a file."""
    if description:
        layers = adaptable_layers(model)
        held = {path: settings for path, settings in description.items() if path in layers}
        chosen = {path: (layers[path], LoraSettings(**s)) for path, s in held.items()}
        put(model, chosen, freeze)


def values(variable: keras.Variable) -> np.ndarray:
    """Returns a variable's values on the host; what lies in parts is gathered by all processes."""
    return np.asarray(keras.ops.convert_to_numpy(gather.whole(variable)))
