"""Modules that are trained as a whole beside adapters, or by their bias (PEFT's `modules_to_save`).

Their layers have trained copies of the variables while the originals are kept, see
`kmodels.layers.copies`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.layers import Dense, Embedding, LayerNorm, RMSNorm
from kmodels.layers.base import Layer
from kmodels.layers.copies import Copies, has_original

WEIGHT, BIAS = "weight", "bias"
# Names of the table in transformers: as embedding, and as output layer.
TABLE, HEAD = "embed_tokens", "lm_head"
TABLES = ("embeddings", "reverse_embeddings")


@dataclass(frozen=True)
class Module:
    """A layer, or one table of an embedding, that is one module in transformers.

    Args:
        layer: the layer.
        attributes: its attribute for each part of the module that it has, "weight" or "bias".
    """

    layer: Any
    attributes: Mapping[str, str]

    def variable(self, part: str) -> Any:
        """Returns the variable that the layer uses for a part now: a copy if it has one.

        It is None for a quantized kernel without a copy.
        """
        return getattr(self.layer, self.attributes[part])

    def shape(self, part: str) -> tuple[int, ...]:
        """Returns the shape of a part in transformers."""
        variable, layer = self.variable(part), self.layer
        shape = (layer.input_dim, layer.units) if variable is None else tuple(variable.shape)
        return shape[::-1] if self.transposed(part) else shape

    def transposed(self, part: str) -> bool:
        """Returns True if a part is a matrix that transformers keeps transposed."""
        return self.attributes[part] == "kernel"


def modules(model: keras.Model) -> dict[str, Module]:
    """Returns every module that may be trained as a whole, by path.

    An output layer with a table of its own is "token_embedding/reverse_embeddings".
    """
    found: dict[str, Module] = {}
    for layer in keras_internals.sublayers(model):
        if not isinstance(layer, Layer) or not layer.built:
            continue
        if isinstance(layer, Embedding):
            if layer.is_vocabulary:
                found[layer.path] = Module(layer, {WEIGHT: TABLES[0]})
                if not layer.tie_weights:
                    found[f"{layer.path}/{TABLES[1]}"] = Module(layer, {WEIGHT: TABLES[1]})
            continue
        weight = "kernel" if isinstance(layer, Dense) else "scale"
        named = {WEIGHT: weight} if isinstance(layer, Dense | LayerNorm | RMSNorm) else {}
        named[BIAS] = "bias"
        parts = {part: name for part, name in named.items() if has_original(layer, name)}
        if parts:
            found[layer.path] = Module(layer, parts)
    return found


def copies(model: keras.Model, merged: bool = False) -> dict[str, Copies]:
    """Returns the copies by path of their layer; with `merged` those that were merged."""
    name = "merged_copies" if merged else "copies"
    layers = keras_internals.sublayers(model)
    found = {layer.path: getattr(layer, name, None) for layer in layers}
    return {path: held for path, held in found.items() if held is not None}


def train(chosen: Iterable[Module]) -> None:
    """Gives layers trained copies of whole modules."""
    put((module, part) for module in chosen for part in module.attributes)


def put(parts: Iterable[tuple[Module, str]]) -> None:
    """Gives layers trained copies of these parts of modules."""
    by_layer: dict[int, tuple[Any, list[str]]] = {}
    for module, part in parts:
        names = by_layer.setdefault(id(module.layer), (module.layer, []))[1]
        names.append(module.attributes[part])
    for layer, names in by_layer.values():
        if layer.copies is None:
            Copies(layer, names)
        else:
            layer.copies.add(names)


def trained(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Returns the trained variables of modules by path and part, copies or not."""
    found = {}
    for path, module in modules(model).items():
        parts = {part: module.variable(part) for part in module.attributes}
        parts = {part: v for part, v in parts.items() if v is not None}
        # A module is written whole if its weight is trained.
        if WEIGHT not in parts or not parts[WEIGHT].trainable:
            parts = {part: v for part, v in parts.items() if v.trainable}
        if parts:
            found[path] = parts
    return found


def describe(model: keras.Model) -> dict[str, list[str]]:
    """Returns the names of the copied variables by path of their layer."""
    return {path: list(held.originals) for path, held in copies(model).items()}


def restore(model: keras.Model, description: Mapping[str, Iterable[str]]) -> None:
    """Gives a new model the copies of `describe`, to be filled from a file."""
    for layer in keras_internals.sublayers(model):
        if layer.path in description:
            Copies(layer, [n for n in description[layer.path] if has_original(layer, n)])
