"""Describes and repeats changes of a model: quantization, adapters, trained copies, freezing.

The description stands in the config of a model or layer beside its arguments, so that `.keras`
files, `clone_model`, `deepcopy` and `pickle` restore the changes. Merged adapters are not
described: their kernels are ordinary weights.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras

from kmodels.core import keras_internals
from kmodels.layers.copies import Copies, TrainedRows, has_original

if TYPE_CHECKING:
    from kmodels.layers.adapter import Adaptable, AdaptableLayer, Adapter, LoraSettings

KEYS = ("quantization", "lora", "rows", "copies", "frozen")


def adaptable_layers(model: keras.Layer) -> "dict[str, Adaptable]":
    """Returns every layer or table that may have an adapter, by path in the order of the model."""
    layers: list[Any] = []
    for layer in keras_internals.sublayers(model):
        if hasattr(layer, "add_adapter"):
            layers.append(layer)
        elif layer.built:
            layers += getattr(layer, "tables", ())
    return {layer.path: layer for layer in layers}


def adapters(model: keras.Layer, merged: bool = False) -> "dict[str, Adapter]":
    """Returns the adapters by path of their layer; with `merged` those that were merged."""
    name = "merged" if merged else "adapter"
    parts = {path: getattr(layer, name) for path, layer in adaptable_layers(model).items()}
    return {path: adapter for path, adapter in parts.items() if adapter is not None}


def quantized_layers(model: keras.Layer) -> "dict[str, AdaptableLayer]":
    """Returns every layer with a quantized kernel by its path."""
    layers = (x for x in keras_internals.sublayers(model) if hasattr(x, "restore_quantized"))
    return {layer.path: layer for layer in layers if layer.quantized is not None}


def rows(model: keras.Layer, merged: bool = False) -> dict[str, TrainedRows]:
    """Returns trained rows by path of their embedding; with `merged` those that were merged."""
    return _parts(model, "merged_rows" if merged else "rows", TrainedRows)


def copies(model: keras.Layer, merged: bool = False) -> dict[str, Copies]:
    """Returns trained copies by path of their layer; with `merged` those that were merged."""
    return _parts(model, "merged_copies" if merged else "copies", Copies)


def _parts(model: keras.Layer, name: str, kind: type) -> dict[str, Any]:
    parts = {layer.path: getattr(layer, name, None) for layer in keras_internals.sublayers(model)}
    return {path: part for path, part in parts.items() if isinstance(part, kind)}


def trained_parts(model: keras.Layer, merged: bool = False) -> list[Any]:
    """Returns adapters, trained rows and copies; with `merged` those that were merged."""
    return [
        part for find in (adapters, rows, copies) for part in find(model, merged=merged).values()
    ]


def trained_variables(model: keras.Layer) -> set[int]:
    """Returns the `id`s of the variables of adapters, trained rows and copies."""
    return {id(variable) for part in trained_parts(model) for variable in part.variables}


def is_merged(model: keras.Model) -> bool:
    """Returns True if adapters were added to the kernels of a model."""
    return bool(adapters(model, merged=True))


def put_adapters(
    model: keras.Layer,
    chosen: "Mapping[str, tuple[Adaptable, LoraSettings | Mapping[str, Any]]]",
    freeze: bool = True,
) -> None:
    """Freezes a model and adds an adapter to each chosen layer."""
    for variable in model.weights if freeze else ():
        variable.trainable = False
    for layer, settings in chosen.values():
        layer.add_adapter(settings)


def describe_adapters(model: keras.Layer) -> dict[str, dict[str, Any]]:
    """Returns the settings of each adapter by path of its layer; empty without LoRA."""
    return {path: adapter.settings.to_dict() for path, adapter in adapters(model).items()}


def restore_adapters(
    model: keras.Layer, description: Mapping[str, Mapping[str, Any]], freeze: bool = True
) -> None:
    """Gives a new model the adapters that `describe` returned, with initial values."""
    if description:
        layers = adaptable_layers(model)
        known = {path: (layers[path], x) for path, x in description.items() if path in layers}
        put_adapters(model, known, freeze)


def describe_rows(model: keras.Layer) -> dict[str, list[int]]:
    """Returns the ids of trained rows by path of their embedding; empty without."""
    return {path: list(trained.ids) for path, trained in rows(model).items()}


def restore_rows(model: keras.Layer, description: Mapping[str, Any]) -> None:
    """Gives a new model the rows that `describe_rows` returned, with the values of the table.

    Raises:
        InputError: for ids without a row in the table.
    """
    for layer in keras_internals.sublayers(model):
        if layer.path in description and getattr(layer, "is_vocabulary", False):
            layer.rows = TrainedRows(layer, description[layer.path])


def describe(model: keras.Layer, without: keras.Layer | None = None) -> dict[str, Any]:
    """Returns the changes that `restore` repeats in a new model; often empty.

    A model in it, `without`, is described on its own.
    """
    aside: set[str] = set()
    if without is not None:
        aside = {layer.path for layer in keras_internals.sublayers(without)}
        aside |= set(adaptable_layers(without))  # and the tables of an embedding
    changed: dict[str, dict[str, Any]] = {
        "quantization": {
            path: layer.quantized.settings.to_config()
            for path, layer in quantized_layers(model).items()
        },
        "lora": describe_adapters(model),
        "rows": describe_rows(model),
        "copies": {path: list(part.originals) for path, part in copies(model).items()},
    }
    here = {
        key: {path: value for path, value in parts.items() if path not in aside}
        for key, parts in changed.items()
    }
    here["frozen"] = frozen(model, without)
    return {key: value for key, value in here.items() if value}


def restore(
    model: keras.Layer,
    description: Mapping[str, Any],
    without: keras.Layer | None = None,
    keeps_values: bool = False,
) -> None:
    """Changes a built model or layer like the one that `describe` described.

    A model in it, `without`, is described on its own. `keeps_values` is False if a file will
    replace its random values.

    Raises:
        InputError: for values to be quantized in a mode that is read from files alone, or ids
            without a row in the table.
    """
    quantized = description.get("quantization", {})
    for layer in keras_internals.sublayers(model):
        if layer.path in quantized:
            layer.restore_quantized(quantized[layer.path], keeps_values)
    restore_adapters(model, description.get("lora", {}), freeze="frozen" not in description)
    restore_rows(model, description.get("rows", {}))
    copied = description.get("copies", {})
    for layer in keras_internals.sublayers(model):
        if layer.path in copied:
            Copies(layer, [name for name in copied[layer.path] if has_original(layer, name)])
    if "frozen" in description:
        freeze(model, description["frozen"], without)


def describe_layer(layer: keras.Layer) -> dict[str, Any]:
    """Describes one layer for `restore_layer`, by paths that begin below the layer.

    Args:
        layer: a built layer. If it has no sublayers, Keras' config holds whether it is frozen.
    """
    description = describe(layer)
    if description == {"frozen": {"layers": {"": False}}} and not keras_internals.children(layer):
        return {}
    return _renamed(description, lambda path: path.removeprefix(layer.path).removeprefix("/"))


def restore_layer(layer: keras.Layer, description: Mapping[str, Any]) -> None:
    """Changes a new layer, in any model, like the one that `describe_layer` described."""
    restore(layer, _renamed(description, lambda path: f"{layer.path}/{path}".removesuffix("/")))


def _renamed(description: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Returns a description with other paths; the model or layer as a whole is ""."""
    renamed = {
        key: {rename(path): value for path, value in description[key].items()}
        for key in KEYS
        if key in description and key != "frozen"
    }
    if "frozen" in description:
        renamed["frozen"] = {
            key: {rename(path) if path else "": value for path, value in parts.items()}
            for key, parts in description["frozen"].items()
        }
    return renamed


def frozen(model: keras.Model, without: keras.Layer | None = None) -> dict[str, dict[str, bool]]:
    """Returns the layers and variables that are not as trainable as their parents.

    The path of the model itself is ""; a model in it, `without`, is left out.
    """
    layers, variables = {}, {}
    for layer, path, parent in _walk(model, without):
        if layer.trainable != (parent is None or parent.trainable):
            layers[path] = layer.trainable
        own = keras_internals.made_trainable(layer)
        variables |= {v.path: v.trainable for v in own if v.trainable != layer.trainable}
    differing = {"layers": layers, "variables": variables}
    return {key: value for key, value in differing.items() if value}


def freeze(
    model: keras.Model,
    description: Mapping[str, Mapping[str, bool]],
    without: keras.Layer | None = None,
) -> None:
    """Freezes the layers and variables that `frozen` described; unknown paths are ignored."""
    layers, variables = description.get("layers", {}), description.get("variables", {})
    for layer, path, parent in _walk(model, without):
        own = layers.get(path, parent is None or parent.trainable)
        keras_internals.set_trainable(layer, own)
        for variable in keras_internals.made_trainable(layer):
            variable.trainable = variables.get(variable.path, own)


def _walk(model: keras.Model, without: keras.Layer) -> Iterator[tuple[Any, str, Any]]:
    """Yields layer, path and parent of a model and all its sublayers, parents first."""
    seen = set() if without is None else {id(layer) for layer in keras_internals.sublayers(without)}
    waiting: list[tuple[Any, str, Any]] = [(model, "", None)]
    while waiting:
        layer, path, parent = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer, path, parent
            below = reversed(keras_internals.children(layer))
            # An input has no path: it was never built and has no variables.
            waiting += [(child, child.path, layer) for child in below if child.path is not None]
