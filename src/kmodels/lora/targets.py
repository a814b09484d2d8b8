"""The linear layers that an adapter is for."""

from collections.abc import Iterable, Mapping, Sequence

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Dense, Embedding, GroupedDense
from kmodels.layers.embedding import Table
from kmodels.lora.patterns import matching

ALL = "all-linear"


def linear_layers(model: keras.Model) -> dict[str, Dense]:
    """Returns every linear layer of a model by its path, in the order of computation."""
    return {
        layer.path: layer for layer in keras_internals.sublayers(model) if isinstance(layer, Dense)
    }


def expert_layers(model: keras.Model) -> dict[str, GroupedDense]:
    """Returns every layer with a kernel for each expert by its path, in that order too."""
    layers = keras_internals.sublayers(model)
    return {layer.path: layer for layer in layers if isinstance(layer, GroupedDense)}


def tables(model: keras.Model) -> dict[str, Table]:
    """Returns every table of an embedding that may have an adapter by its path."""
    layers = [x for x in keras_internals.sublayers(model) if isinstance(x, Embedding)]
    return {table.path: table for layer in layers if layer.built for table in layer.tables}


def is_lookup(layer: object) -> bool:
    """Returns True for a table that rows are looked up in."""
    return isinstance(layer, Table) and not layer.is_output


def adaptable_layers(model: keras.Model) -> dict[str, Dense | GroupedDense | Table]:
    """Returns every layer that may have an adapter by its path, and every such table."""
    return {**linear_layers(model), **expert_layers(model), **tables(model)}


def meant(paths: Iterable[str], target: str) -> set[str]:
    """Returns the paths that a target means, by name, end of the path, or pattern.

    Raises:
        InputError: for a pattern that is none, or that takes too long.
    """
    paths = list(paths)
    if target == ALL:
        return set(paths)
    named = {path for path in paths if f"/{path}".endswith(f"/{target}")}
    return named | matching(target, paths)


def choose(model: keras.Model, targets: str | Sequence[str]) -> dict[str, Dense | Table]:
    """Returns the layers that the targets mean.

    Args:
        model: where to look.
        targets: "all-linear", a name ("query"), the end of a path ("mlp/up"), a regular expression
            for whole paths (r"block_[0-3]/.*"), or several of those.

    Raises:
        InputError: for a target that means no layer.
    """
    layers = {**linear_layers(model), **tables(model)}
    wanted = [targets] if isinstance(targets, str) else list(targets)
    chosen: set[str] = set()
    for target in wanted:
        found = meant(layers, target)
        if not found:
            ends = sorted({"/".join(path.split("/")[-2:]) for path in layers})
            raise InputError(
                f"LoRA target {target!r} is not a linear layer of this model; there are "
                f"{', '.join(ends)}; or give {ALL!r}"
            )
        chosen |= {path for path in found if target != ALL or layers[path].in_all_linear}
    return {path: layer for path, layer in layers.items() if path in chosen}


def choose_experts(
    model: keras.Model, targets: str | Sequence[str], names: Mapping[str, str]
) -> dict[str, GroupedDense]:
    """Returns the layers of experts that `target_parameters` means.

    Args:
        model: where to look.
        targets: as in `choose`, without "all-linear", or the ends of names in transformers.
        names: names in transformers by path.

    Raises:
        InputError: for a target that means no such layer.
    """
    layers = expert_layers(model)
    found: dict[str, GroupedDense] = {}
    for target in [targets] if isinstance(targets, str) else targets:
        named = {path for path in layers if f".{names.get(path)}".endswith(f".{target}")}
        paths = named | meant(layers, target) if target != ALL else set()
        if not paths:
            ends = sorted({"/".join(path.split("/")[-2:]) for path in layers})
            there = f"there are {', '.join(ends)}" if ends else "it has none; leave it out"
            raise InputError(
                f"target_parameters {target!r} is no kernel of experts of this model; {there}"
            )
        found |= {path: layers[path] for path in paths}
    return {path: layer for path, layer in layers.items() if path in found}
