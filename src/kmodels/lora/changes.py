"""Describes and repeats changes of a model: quantization, what LoRA trains, freezing.

The description stands in the config beside what a model or a layer was made with, so that `.keras`
files, `clone_model`, `deepcopy` and `pickle` give the same one. Merged adapters leave nothing to
carry: the kernels are what they are.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.layers import quantized
from kmodels.lora.enable import describe as describe_adapters
from kmodels.lora.enable import restore as restore_adapters
from kmodels.lora.saved_modules import describe as describe_copies
from kmodels.lora.saved_modules import restore as restore_copies
from kmodels.lora.targets import adaptable_layers
from kmodels.lora.vocabulary import describe as describe_rows
from kmodels.lora.vocabulary import restore as restore_rows

KEYS = ("quantization", "lora", "rows", "copies", "frozen")


def describe(model: keras.Model, without: keras.Layer | None = None) -> dict[str, Any]:
    """Returns what `restore` needs to change a new model likewise; often empty.

    Args:
        model: a built model.
        without: a model in it that is described on its own.
    """
    aside: set[str] = set()
    if without is not None:
        aside = {layer.path for layer in keras_internals.sublayers(without)}
        aside |= set(adaptable_layers(without))  # and the tables of an embedding

    def here(found: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in found.items() if path not in aside}

    found = {
        "quantization": here(quantized.describe(model)),
        "lora": here(describe_adapters(model)),
        "rows": here(describe_rows(model)),
        "copies": here(describe_copies(model)),
        "frozen": frozen(model, without),
    }
    return {key: value for key, value in found.items() if value}


def restore(
    model: keras.Model, description: Mapping[str, Any], without: keras.Layer | None = None
) -> None:
    """Does to a new model what was done to the described one; values come from a file."""
    quantized.restore(model, description.get("quantization", {}))
    restore_adapters(model, description.get("lora", {}), freeze="frozen" not in description)
    restore_rows(model, description.get("rows", {}))
    restore_copies(model, description.get("copies", {}))
    if "frozen" in description:
        freeze(model, description["frozen"], without)


def describe_layer(layer: keras.Layer) -> dict[str, Any]:
    """Describes one layer for `restore_layer`, by paths that begin below the layer.

    Args:
        layer: a built layer. Keras' own config says that a layer without parts is frozen.
    """
    found = describe(layer)
    if found == {"frozen": {"layers": {"": False}}} and not keras_internals.children(layer):
        return {}
    return _renamed(found, lambda path: path.removeprefix(layer.path).removeprefix("/"))


def restore_layer(layer: keras.Layer, description: Mapping[str, Any]) -> None:
    """Does to a new layer what was done to the described one, whatever it is part of."""
    restore(layer, _renamed(description, lambda path: f"{layer.path}/{path}".removesuffix("/")))


def _renamed(description: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Returns a description with other paths; the model or layer as a whole is ""."""
    found = {
        key: {rename(path): value for path, value in description[key].items()}
        for key in KEYS
        if key in description and key != "frozen"
    }
    if "frozen" in description:
        found["frozen"] = {
            key: {rename(path) if path else "": value for path, value in parts.items()}
            for key, parts in description["frozen"].items()
        }
    return found


def frozen(model: keras.Model, without: keras.Layer | None = None) -> dict[str, dict[str, bool]]:
    """Returns the layers and variables that are not as trainable as their parents.

    Args:
        model: a built model; it is the layer "" in what is returned.
        without: a model in it that is left out.
    """
    layers, variables = {}, {}
    for layer, path, parent in _walk(model, without):
        if layer.trainable != (parent is None or parent.trainable):
            layers[path] = layer.trainable
        made = keras_internals.made_trainable(layer)
        variables |= {v.path: v.trainable for v in made if v.trainable != layer.trainable}
    found = {"layers": layers, "variables": variables}
    return {key: value for key, value in found.items() if value}


def freeze(
    model: keras.Model,
    description: Mapping[str, Mapping[str, bool]],
    without: keras.Layer | None = None,
) -> None:
    """Makes a model as trainable as `frozen` describes; what is not there is passed over."""
    layers, variables = description.get("layers", {}), description.get("variables", {})
    for layer, path, parent in _walk(model, without):
        own = layers.get(path, parent is None or parent.trainable)
        keras_internals.set_trainable(layer, own)
        for variable in keras_internals.made_trainable(layer):
            variable.trainable = variables.get(variable.path, own)


def _walk(model: keras.Model, without: keras.Layer) -> Iterator[tuple[Any, str, Any]]:
    """Yields a model and all below it with path and owner, each behind its owner."""
    seen = set() if without is None else {id(layer) for layer in keras_internals.sublayers(without)}
    waiting: list[tuple[Any, str, Any]] = [(model, "", None)]
    while waiting:
        layer, path, parent = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer, path, parent
            below = reversed(keras_internals.children(layer))
            # An input has no path: it was never built, and has nothing to train.
            waiting += [(child, child.path, layer) for child in below if child.path is not None]
