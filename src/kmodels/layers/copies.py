"""Trained copies of variables of a layer, whose originals are kept (PEFT's `modules_to_save`)."""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals, traced
from kmodels.layers.shard_granularity import add_weight, granularity_of

PREFIX = "lora_"


class Copies:
    """Copies of some variables of a layer, which the layer uses in place of the originals.

    They belong to the layer (block_0/mlp/up/lora_kernel), are trained, and start as the originals,
    which are frozen. The layer's attribute of a variable's name is the copy while they are on. The
    copy of a quantized kernel holds floats; its original is None, since the numbers stay where they
    are.

    Args:
        layer: a built layer of kmodels without copies.
        names: attributes with the variables, such as "kernel"; see `has_original`.

    Weights:
        lora_<name> for each name, with the shape and dtype of the original.

    Attributes:
        originals: the variables that the layer was made with, by name.
        variables: the copies by name.
        base: values of the originals before merging, None while the copies are not merged.
    """

    def __init__(self, layer: Any, names: Iterable[str]):
        self.layer = layer
        self.originals: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        self.base: dict[str, np.ndarray] | None = None
        self._trainable: dict[str, bool] = {}
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        """Adds copies of further variables of the layer."""
        with keras_internals.changing(self.layer):
            for name in names:
                original = self.originals[name] = getattr(self.layer, name)
                self._trainable[name] = original is not None and original.trainable
                self.variables[name] = self._made(name, original)
        self.on()

    def _made(self, name: str, original: Any) -> Any:
        layer = self.layer
        if original is None:  # a quantized kernel
            granularity = layer.shard_granularity
            settings: dict[str, Any] = {
                "shape": (layer.input_dim, layer.units),
                "initializer": lambda shape, dtype=None: keras.ops.cast(
                    layer.quantized.wide(), dtype or layer.variable_dtype
                ),
                "dtype": layer.variable_dtype,
                "regularizer": layer.kernel_regularizer,
                "constraint": layer.kernel_constraint,
            }
        else:
            granularity = granularity_of(original)
            settings = {
                "shape": original.shape,
                "initializer": lambda shape, dtype=None: keras.ops.copy(original.value),
                "dtype": original.dtype,
                "regularizer": original.regularizer,
                "constraint": original.constraint,
            }
        return add_weight(layer, granularity, name=PREFIX + name, **settings)

    def on(self) -> None:
        """Makes the layer use the copies."""
        for name, variable in self.variables.items():
            if self.originals[name] is not None:
                self.originals[name].trainable = False
            setattr(self.layer, name, variable)
        self.layer.copies = self
        traced.changed()

    def off(self) -> None:
        """Makes the layer use the originals."""
        for name, original in self.originals.items():
            setattr(self.layer, name, original)
        self.layer.copies = None
        traced.changed()

    def start(self) -> None:
        """Gives the copies the values of the originals."""
        for name, variable in self.variables.items():
            original = self.originals[name]
            variable.assign(self.layer.quantized.wide() if original is None else original.value)

    def merge(self) -> None:
        """Writes the copies into the originals, none of them quantized, and leaves the layer."""
        self.base = {}
        for name, original in self.originals.items():
            self.base[name] = np.array(keras.ops.convert_to_numpy(original.value))
            original.assign(self.variables[name].value)
        self.remove()
        self.layer.merged_copies = self

    def unmerge(self) -> None:
        """Puts back the values of the originals, bit for bit, and joins the layer again."""
        for name, values in (self.base or {}).items():
            self.originals[name].assign(values)
        self.base = None
        keras_internals.attach(self.layer, self.variables.values())
        self.layer.merged_copies = None
        self.on()

    def remove(self) -> None:
        """Removes the copies; the originals are unchanged, and as trainable as before."""
        self.off()
        keras_internals.detach(self.layer, self.variables.values())
        for name, original in self.originals.items():
            if original is not None:
                original.trainable = self._trainable[name]


def original(layer: Any, name: str) -> Any:
    """Returns the original variable of a layer, also if a copy replaces it."""
    held = getattr(layer, "copies", None)
    return held.originals[name] if held and name in held.originals else getattr(layer, name, None)


def has_original(layer: Any, name: str) -> bool:
    """Returns True if a layer has a variable of this name, or a quantized kernel."""
    quantized = name == "kernel" and getattr(layer, "quantized", None) is not None
    return quantized or isinstance(original(layer, name), keras.Variable)


def plain(layer: keras.Layer) -> dict[str, Any]:
    """Returns a layer's variables without its copies, by name in a file of Keras."""
    copies = {id(v) for v in named(layer).values()}
    own = [v for v in keras_internals.own_variables(layer) if id(v) not in copies]
    return {str(i): v for i, v in enumerate(own)}


def named(layer: Any) -> dict[str, Any]:
    """Returns the copies of a layer by name in a file of Keras; empty without."""
    held = getattr(layer, "copies", None)
    return {PREFIX + name: v for name, v in held.variables.items()} if held else {}


def names(layer: Any, store: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the original for the name of each copy that a file holds for a layer.

    For a quantized kernel it is the copy, if the layer has one.
    """
    found, own = {}, named(layer)
    for key in store.keys():  # noqa: SIM118
        variable = original(layer, key.removeprefix(PREFIX)) if key.startswith(PREFIX) else None
        variable = own.get(key) if variable is None else variable
        if isinstance(variable, keras.Variable):
            found[key] = variable
    return found


def save(layer: keras.Layer, store: MutableMapping[str, Any]) -> None:
    """Writes the copies of a layer by name."""
    for key, variable in named(layer).items():
        store[key] = variable


def load(layer: Any, store: Mapping[str, Any]) -> None:
    """Loads the copies that `save` wrote, after the originals are loaded.

    A layer without copies takes those of the file into its originals; copies without a counterpart
    in the file start over.
    """
    if getattr(layer, "copies", None):
        layer.copies.start()
    copies = named(layer)
    for key, variable in names(layer, store).items():
        copies.get(key, variable).assign(store[key])
