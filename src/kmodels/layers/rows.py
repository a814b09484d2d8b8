"""Rows of an embedding table that are trained while the table itself is frozen."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers import copies, kernels
from kmodels.layers.shard_granularity import add_weight

ROWS, IDS = "lora_rows", "lora_row_ids"


class TrainedRows:
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
        base: the rows of the table before merging, None while they are not merged.

    Raises:
        InputError: for ids without a row in the table, or ids named twice.
    """

    def __init__(self, layer: keras.Layer, ids: Sequence[int]):
        check_ids(ids, layer.input_dim)
        self.layer = layer
        self.ids = tuple(sorted(ids))
        self.base: np.ndarray | None = None
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

    def over(self, token_ids: Tensor, found: Tensor) -> Any:
        """Replaces looked-up rows (..., D) for the ids that have trained rows."""
        ids = keras.ops.cast(token_ids, "int32")
        places = self.places()
        at = keras.ops.searchsorted(places, keras.ops.reshape(ids, (-1,)))
        at = keras.ops.reshape(keras.ops.minimum(at, len(self.ids) - 1), keras.ops.shape(ids))
        own = keras.ops.expand_dims(keras.ops.equal(keras.ops.take(places, at), ids), -1)
        rows = keras.ops.take(keras.ops.cast(self.values, found.dtype), at, axis=0)
        return keras.ops.where(own, rows, found)

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

    def on(self) -> None:
        """Makes the layer use the rows."""
        self.layer.rows = self

    def off(self) -> None:
        """Makes the layer use its table alone."""
        self.layer.rows = None

    def merge(self) -> None:
        """Writes the rows into the table, rounded once, and leaves the layer."""
        layer = self.layer
        table = layer.embeddings.value
        self.base = keras.ops.convert_to_numpy(keras.ops.take(table, self.places(), axis=0))
        write(layer, self.ids, self.values.value)
        self.remove()
        layer.merged_rows = self

    def unmerge(self) -> None:
        """Puts back the rows of the table, bit for bit, and joins the layer again."""
        write(self.layer, self.ids, self.base)
        self.base = None
        keras_internals.attach(self.layer, [self.values])
        self.layer.merged_rows = None
        self.on()

    def remove(self) -> None:
        """Removes the rows from the layer; the table is unchanged."""
        self.off()
        keras_internals.detach(self.layer, [self.values])


def write(layer: keras.Layer, ids: Iterable[int], rows: Tensor | None) -> None:
    """Replaces some rows of a table, rounded to its dtype."""
    table = layer.embeddings.value
    places = keras.ops.convert_to_tensor([[i] for i in ids], "int32")
    rows = keras.ops.cast(keras.ops.convert_to_tensor(rows), table.dtype)
    layer.embeddings.assign(keras.ops.scatter_update(table, places, rows))


def _tables(layer: keras.Layer) -> dict[str, Any]:
    """Returns the tables of a layer by their places in a file; none before it is built."""
    if not layer.built:
        return {}
    names = ("embeddings",) if layer.tie_weights else ("embeddings", "reverse_embeddings")
    return {str(place): copies.original(layer, name) for place, name in enumerate(names)}


def save(layer: keras.Layer, store: MutableMapping[str, Any]) -> None:
    """Writes each table as Keras does, and the trained rows by name."""
    for place, table in _tables(layer).items():
        store[place] = table
    if layer.rows is not None:
        store[ROWS] = layer.rows.values
        store[IDS] = np.array(layer.rows.ids, "int32")
    for table in layer.tables:
        kernels.save_adapter(table, store)
    copies.save(layer, store)


def misfit(layer: keras.Layer, store: Mapping[str, Any]) -> str | None:
    """Returns why a layer cannot load its arrays of a file, or None.

    Args:
        layer: an `Embedding`; if it was never called, a file has no arrays for it, as in Keras.
        store: arrays by name, as `save` writes them.
    """
    held = set(store.keys())
    if not layer.built:
        return kernels.UNBUILT if held else None
    if "0" not in held:
        return "the file holds nothing for it"
    if (separate := "1" in held) == layer.tie_weights:
        return f"the file holds {'an' if separate else 'no'} output layer of its own"
    for place, table in _tables(layer).items():
        here, there = tuple(table.shape), tuple(store[place].shape)
        if here != there:
            return f"{table.name} is {here}, in the file {there}"
    for table in layer.tables:
        if problem := kernels.misfit_of_adapter(table, kernels.within(store, table.prefix)):
            return problem
    for name, variable in copies.names(layer, store).items():
        if tuple(store[name].shape) != tuple(variable.shape):
            return f"{variable.name} is {tuple(variable.shape)}, {name} in the file another size"
    ids = tuple(np.asarray(store[IDS]).tolist()) if IDS in held else ()
    if ids and layer.rows is not None and ids != layer.rows.ids:
        return f"its trained rows are {shown(layer.rows.ids)}, the file's {shown(ids)}"
    return None


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


def load(layer: keras.Layer, store: Mapping[str, Any]) -> None:
    """Fills a layer from a file that fits, see `Embedding.load_own_variables`."""
    if not layer.built:
        return
    for place, table in _tables(layer).items():
        table.assign(store[place])
    if ROWS not in set(store.keys()):
        if layer.rows is not None:
            layer.rows.start()
    elif layer.rows is not None:
        layer.rows.values.assign(store[ROWS])
    else:
        write(layer, np.asarray(store[IDS]).tolist(), np.asarray(store[ROWS]))
    for table in layer.tables:
        kernels.load_adapter(table, kernels.within(store, table.prefix))
    copies.load(layer, store)
