"""Trained copies of variables of a layer, and of single rows of a table; the originals are frozen.

PEFT has them as `modules_to_save` and `trainable_token_indices`.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers.placement import add_weight, granularity_of

PREFIX = "lora_"
# Names of trained rows and of their ids in a file of Keras.
ROWS, IDS = "lora_rows", "lora_row_ids"


class TrainedPart:
    """Variables that a layer trains beside its own, or in place of them, until they are merged.

    Args:
        layer: the layer that uses them.
        owner: the layer that they belong to.

    Attributes:
        name: attribute of the layer that holds the part while it is on.
        merged_as: attribute that holds it once it is merged.
        base: the values that merging replaced, None while it is not merged.
    """

    name: str
    merged_as: str
    base: Any = None

    def __init__(self, layer: Any, owner: Any):
        self.layer = layer
        self.owner = owner

    @property
    def variables(self) -> list[Any]:
        """The trained variables."""
        raise NotImplementedError

    def write(self) -> Any:
        """Writes the variables into those of the layer; returns the values that these had."""
        raise NotImplementedError

    def put_back(self, base: Any) -> None:
        """Undoes `write`."""
        raise NotImplementedError

    def on(self) -> None:
        """Makes the layer use the part."""
        setattr(self.layer, self.name, self)

    def off(self) -> None:
        """Makes the layer compute its base alone."""
        setattr(self.layer, self.name, None)

    def remove(self) -> None:
        """Removes the part from the layer, whose own variables are unchanged."""
        self.off()
        keras_internals.detach(self.owner, self.variables)

    def merge(self) -> None:
        """Writes the part into the layer's own variables, and leaves it."""
        self.base = self.write()
        self.remove()
        setattr(self.layer, self.merged_as, self)

    def unmerge(self) -> None:
        """Puts back the values before `merge`, bit for bit, and joins the layer again."""
        self.put_back(self.base)
        self.base = None
        keras_internals.attach(self.owner, self.variables)
        setattr(self.layer, self.merged_as, None)
        self.on()


class Copies(TrainedPart):
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
        by_name: the copies by name.
    """

    name, merged_as = "copies", "merged_copies"

    def __init__(self, layer: Any, names: Iterable[str]):
        super().__init__(layer, layer)
        self.originals: dict[str, Any] = {}
        self.by_name: dict[str, Any] = {}
        self._trainable: dict[str, bool] = {}
        self.add(names)

    def add(self, names: Iterable[str]) -> None:
        """Adds copies of further variables of the layer."""
        with keras_internals.changing(self.layer):
            for name in names:
                original = self.originals[name] = getattr(self.layer, name)
                self._trainable[name] = original is not None and original.trainable
                self.by_name[name] = self._made(name, original)
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

    @property
    def variables(self) -> list[Any]:
        """The copies."""
        return list(self.by_name.values())

    def on(self) -> None:
        """Makes the layer use the copies."""
        for name, variable in self.by_name.items():
            if self.originals[name] is not None:
                self.originals[name].trainable = False
            setattr(self.layer, name, variable)
        super().on()

    def off(self) -> None:
        """Makes the layer use the originals."""
        for name, original in self.originals.items():
            setattr(self.layer, name, original)
        super().off()

    def start(self) -> None:
        """Gives the copies the values of the originals."""
        for name, variable in self.by_name.items():
            original = self.originals[name]
            variable.assign(self.layer.quantized.wide() if original is None else original.value)

    def write(self) -> dict[str, np.ndarray]:
        """Writes the copies into the originals, none of them quantized."""
        base = {}
        for name, original in self.originals.items():
            base[name] = np.array(keras.ops.convert_to_numpy(original.value))
            original.assign(self.by_name[name].value)
        return base

    def put_back(self, base: Mapping[str, np.ndarray]) -> None:
        """Restores the originals."""
        for name, values in base.items():
            self.originals[name].assign(values)

    def remove(self) -> None:
        """Removes the copies; the originals are as trainable as before."""
        super().remove()
        for name, original in self.originals.items():
            if original is not None:
                original.trainable = self._trainable[name]


def original(layer: Any, name: str) -> Any:
    """Returns the original variable of a layer, also if a copy replaces it."""
    copies = getattr(layer, "copies", None)
    if copies and name in copies.originals:
        return copies.originals[name]
    return getattr(layer, name, None)


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
    copies = getattr(layer, "copies", None)
    return {PREFIX + name: v for name, v in copies.by_name.items()} if copies else {}


def names(layer: Any, store: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the original for the name of each copy that a file holds for a layer.

    For a quantized kernel it is the copy, if the layer has one.
    """
    originals, own = {}, named(layer)
    for key in store.keys():  # noqa: SIM118
        variable = original(layer, key.removeprefix(PREFIX)) if key.startswith(PREFIX) else None
        variable = own.get(key) if variable is None else variable
        if isinstance(variable, keras.Variable):
            originals[key] = variable
    return originals


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


# === Rows of an embedding table ===


class TrainedRows(TrainedPart):
    """A small matrix that replaces some rows of a table, in look-ups and in logits.

    It belongs to the layer (token_embedding/lora_rows) and is float32, or float64 for a table of
    that dtype. It starts as the rows that it stands for.

    Args:
        layer: a built `layers.Embedding` without such rows.
        ids: ids of the rows.

    Weights:
        lora_rows (N, D).

    Attributes:
        ids: in ascending order.

    Raises:
        InputError: for ids without a row in the table, or ids named twice.
    """

    name, merged_as = "rows", "merged_rows"

    def __init__(self, layer: keras.Layer, ids: Sequence[int]):
        check_ids(ids, layer.input_dim)
        super().__init__(layer, layer)
        self.ids = tuple(sorted(ids))
        with keras_internals.changing(layer):
            self.values = add_weight(
                layer,
                None,
                shape=(len(self.ids), layer.output_dim),
                initializer=self._first,
                dtype=keras.backend.result_type(layer.embeddings.dtype, "float32"),
                name=ROWS,
            )

    def _first(self, _: object, dtype: str | None = None) -> Any:
        table = self.layer.embeddings.value
        return keras.ops.cast(keras.ops.take(table, self.places(), axis=0), dtype)

    def start(self) -> None:
        """Makes the rows those of the table."""
        self.values.assign(self._first(None, self.values.dtype))

    def places(self) -> Any:
        """Returns the ids as a tensor, (N,) int32."""
        return keras.ops.convert_to_tensor(self.ids, "int32")

    def over(self, token_ids: Tensor, looked_up: Tensor) -> Any:
        """Replaces looked-up rows (..., D) for the ids that have trained rows."""
        ids = keras.ops.cast(token_ids, "int32")
        places = self.places()
        at = keras.ops.searchsorted(places, keras.ops.reshape(ids, (-1,)))
        at = keras.ops.reshape(keras.ops.minimum(at, len(self.ids) - 1), keras.ops.shape(ids))
        own = keras.ops.expand_dims(keras.ops.equal(keras.ops.take(places, at), ids), -1)
        rows = keras.ops.take(keras.ops.cast(self.values, looked_up.dtype), at, axis=0)
        return keras.ops.where(own, rows, looked_up)

    def among(self, hidden: Tensor, logits: Tensor) -> Any:
        """Returns the logits of the table, (..., V), with those of these rows in their places."""
        rows = keras.ops.transpose(keras.ops.cast(self.values, hidden.dtype))
        own = keras.ops.cast(keras.ops.matmul(hidden, rows), logits.dtype)
        classes_first = keras.ops.scatter_update(
            keras.ops.moveaxis(logits, -1, 0),
            keras.ops.expand_dims(self.places(), 1),
            keras.ops.moveaxis(own, -1, 0),
        )
        return keras.ops.moveaxis(classes_first, 0, -1)

    @property
    def variables(self) -> list[Any]:
        """The rows."""
        return [self.values]

    def write(self) -> Any:
        """Writes the rows into the table, rounded once."""
        table = self.layer.embeddings.value
        base = keras.ops.convert_to_numpy(keras.ops.take(table, self.places(), axis=0))
        write(self.layer, self.ids, self.values.value)
        return base

    def put_back(self, base: Any) -> None:
        """Restores the rows of the table."""
        write(self.layer, self.ids, base)


def write(layer: keras.Layer, ids: Iterable[int], rows: Tensor | None) -> None:
    """Replaces some rows of a table, rounded to its dtype."""
    table = layer.embeddings.value
    places = keras.ops.convert_to_tensor([[i] for i in ids], "int32")
    rows = keras.ops.cast(keras.ops.convert_to_tensor(rows), table.dtype)
    layer.embeddings.assign(keras.ops.scatter_update(table, places, rows))


def check_ids(ids: Sequence[int], size: int) -> None:
    """Raises InputError for no ids, ids without a row in a table of this size, or repeated ones."""
    wrong = [i for i in ids if not 0 <= i < size]
    if not ids or wrong or len(set(ids)) < len(ids):
        what = f"names {shown(wrong)}" if wrong else "names a token twice" if ids else "is empty"
        raise InputError(
            f"trainable_token_indices {what}; give ids from 0 to {size - 1}, each once"
        )


def shown(ids: Iterable[int]) -> str:
    """Returns some ids for a message."""
    ids = list(ids)
    more = f" and {len(ids) - 4} more" if len(ids) > 4 else ""
    return ", ".join(map(str, ids[:4])) + more
