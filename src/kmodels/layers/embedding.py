"""Embeddings of tokens, with the output layer of a language model, and of positions."""

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core import keras_internals, traced
from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.types import ConstraintLike, InitializerLike, RegularizerLike, Tensor
from kmodels.layers import copies as trained
from kmodels.layers.adapter import UNBUILT, Adaptable
from kmodels.layers.base import Layer, Shape
from kmodels.layers.placement import using
from kmodels.ops._wide import wide
from kmodels.ops.grouped_dense import rows_of

# The deviation that most decoders are drawn with.
UNSCALED = 0.02


class Table(Adaptable):
    """One of the two tables of an `Embedding` without `tie_weights`, as a linear map.

    Its kernel is the table: from ids (V) to rows (D), or, transposed, from hidden states (D) to
    logits (V).

    Args:
        owner: the layer with the table.
        name: "embeddings" or "reverse_embeddings".
    """

    in_all_linear = False
    quantized = None
    bias = None
    shard_granularity = (None, None)

    def __init__(self, owner: "Embedding", name: str):
        super().__init__()
        self.owner = owner
        self.name = name
        self.is_output = name != "embeddings"
        self.is_lookup = not self.is_output
        self.prefix = "reverse_" if self.is_output else ""

    @property
    def path(self) -> str:
        """The path, like that of a layer."""
        return f"{self.owner.path}/{self.name}" if self.is_output else self.owner.path

    @property
    def layout_family(self) -> Any:
        """The family whose layout places the variables."""
        return self.owner.layout_family

    @property
    def input_dim(self) -> int:
        """Width of the inputs."""
        return self.owner.output_dim if self.is_output else self.owner.input_dim

    @property
    def units(self) -> int:
        """Width of the outputs."""
        return self.owner.input_dim if self.is_output else self.owner.output_dim

    @property
    def kernel(self) -> Any:
        """The table (V, D)."""
        return getattr(self.owner, self.name)

    def linear(self, x: Tensor, _: object = None) -> Any:
        """Returns logits (..., V) of hidden states (..., D), in the dtype of these."""
        return _product(x, self.kernel)

    def wide_kernel(self) -> Any:
        """Returns the kernel (in, out) in float32."""
        table = keras.ops.cast(self.kernel, "float32")
        return keras.ops.transpose(table) if self.is_output else table


@keras.saving.register_keras_serializable(package="kmodels")
class Embedding(traced.Noted, Layer):
    """Scaled rows of a table; with reverse=True, logits from the same or a second table.

    Args:
        input_dim: rows V of the table.
        output_dim: width D.
        embeddings_initializer: as Keras takes it; None for a normal distribution of deviation
            1 / sqrt(D), so that the scaled rows have deviation 1.
        embeddings_regularizer: adds to the loss; None for none.
        embeddings_constraint: applied after each step; None for none.
        mask_zero: whether id 0 is padding, and masked for later layers.
        soft_cap: squashes logits to soft_cap * tanh(logits / soft_cap), or None.
        scaled: multiplies rows by sqrt(D), as Gemma does; if False, initial rows have deviation
            0.02.
        tie_weights: whether logits use the same table; if False, a second one.

    Call:
        token_ids (B, T) int -> (B, T, D): the rows times sqrt(D), which is rounded to the compute
        dtype first, as the original does. With reverse=True: hidden states (B, T, D) -> logits
        (B, T, V) in float32.

    Weights:
        embeddings (V, D); without `tie_weights` also reverse_embeddings (V, D); with `rows` also
        lora_rows (N, D). With an adapter of a table lora_a and lora_b, with one of the other
        reverse_lora_a and reverse_lora_b.

    Attributes:
        tables: the tables that may have an adapter; empty if one table is tied.
        entries: names of the methods that read the table, see `with_table`.
        is_vocabulary: whether adapters may train rows of the table, or all of it.
        rows: the rows that `enable_lora(trainable_token_indices=...)` trains, or None.
        merged_rows: the rows that `merge_lora` wrote into the table, or None.
        resized: whether `resize` replaced the table.

    Raises:
        InputError: for sizes that are no whole numbers above 0.
    """

    entries = ("call", "with_table")
    is_vocabulary = True
    rows: Any = traced.Variant()
    embeddings: Any
    reverse_embeddings: Any

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: InitializerLike = None,
        embeddings_regularizer: RegularizerLike = None,
        embeddings_constraint: ConstraintLike = None,
        mask_zero: bool = False,
        soft_cap: float | None = None,
        scaled: bool = True,
        tie_weights: bool = True,
        **kwargs: Any,
    ):
        # Autocast is off: under a mixed policy it would cast the whole table to look up a few rows.
        super().__init__(autocast=False, **kwargs)
        check_whole("input_dim", input_dim)
        check_whole("output_dim", output_dim)
        if embeddings_initializer is None:
            embeddings_initializer = keras.initializers.RandomNormal(
                stddev=1.0 / math.sqrt(output_dim) if scaled else UNSCALED
            )
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        if soft_cap is not None:
            check_number("soft_cap", soft_cap, above=0, more="None, or ")
        self.soft_cap = soft_cap
        self.scaled = scaled
        self.tie_weights = tie_weights
        self.merged_rows: trained.TrainedRows | None = None
        self.resized = False
        self._rows: trained.TrainedRows | None = None
        apart = self.is_vocabulary and not tie_weights
        self.tables = tuple(Table(self, name) for name in (self._tables() if apart else ()))

    @property
    def variant(self) -> tuple[Any, ...]:
        """The state besides variables that compiled code depends on, see `kmodels.core.traced`."""
        return (self._rows, *(table.adapter for table in self.tables))

    @property
    def output_table(self) -> Any:
        """The variable (V, D) that logits come from."""
        return self.embeddings if self.tie_weights else self.reverse_embeddings

    def build(self, input_shape: Shape | None = None) -> None:
        """Makes the table, or both."""
        for name in self._tables():
            setattr(self, name, self._table(name, self.embeddings_initializer))
        # Of a table without logits a step reads a few rows: files may keep the others.
        self.embeddings.is_looked_up = not (self.is_vocabulary and self.tie_weights)

    def _tables(self) -> tuple[str, ...]:
        return ("embeddings",) if self.tie_weights else ("embeddings", "reverse_embeddings")

    def _table(self, name: str, initializer: InitializerLike) -> Any:
        return self.add_parameter(
            name,
            (self.input_dim, self.output_dim),
            initializer,
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
        )

    def resize(self, input_dim: int) -> None:
        """Replaces the table, or both, by one of more or fewer rows.

        The rows that both have keep their values; each new one is the mean of all old ones. Graphs
        that the layer is part of get the new shape of its logits.

        Args:
            input_dim: rows of the new table.

        Raises:
            InputError: for a size that is not a whole number above 0, or that leaves out a trained
                row, or if a table has an adapter.
        """
        check_whole("input_dim", input_dim)
        if input_dim == self.input_dim:
            return
        if adapted := [x.path for x in self.tables if x.adapter or x.merged]:
            raise InputError(
                f"{adapted[0]} has a LoRA adapter, which is for {self.input_dim} rows; call "
                "resize_token_embeddings before enable_lora"
            )
        adapter = self.rows or self.merged_rows
        if adapter is not None and adapter.ids[-1] >= input_dim:
            raise InputError(
                f"row {adapter.ids[-1]} of {self.path} is trained by its own, and {input_dim} rows "
                f"leave it out; give at least {adapter.ids[-1] + 1}"
            )
        copies = self.copies
        if copies is not None:
            copies.remove()
        self.input_dim, self.resized = input_dim, True
        for name in self._tables():
            old = getattr(self, name)
            keras_internals.detach(self, [old])
            with keras_internals.changing(self):
                setattr(self, name, self._table(name, "zeros"))
            getattr(self, name).assign(_resized(old, input_dim))
            getattr(self, name).trainable = old.trainable
        if copies is not None:
            for name, new in trained.Copies(self, copies.originals).by_name.items():
                new.assign(_resized(copies.by_name[name], input_dim))
        if self.rows is not None:  # which come behind the table, as in a model made from the config
            keras_internals.detach(self, [self.rows.values])
            keras_internals.attach(self, [self.rows.values])
        for arguments, outputs in keras_internals.symbolic_calls(self):
            for logits in outputs if arguments.get("reverse") else ():
                keras_internals.give_shape(logits, (*logits.shape[:-1], input_dim))
        traced.changed()

    def call(self, x: Tensor, reverse: bool = False, training: bool = False) -> Any:
        """(B, T) -> (B, T, D), or (B, T, D) -> (B, T, V)."""
        traced.note()
        if reverse:
            return self.logits(x, training)
        if keras.backend.is_float_dtype(x.dtype):  # Keras makes them floats if it guesses an Input
            x = keras.ops.cast(x, "int32")
        if self.embeddings.trainable:
            # Slices keep repeated rows apart, and Keras' optimizers square them before their sum.
            rows = rows_of(self.embeddings, x)
        else:
            rows = keras.ops.take(self.embeddings, x, axis=0)
        rows = keras.ops.cast(rows, self.compute_dtype)
        for adapter in self._adapters(is_output=False):
            rows = adapter.over(x, rows)
        if self.rows is not None:
            rows = self.rows.over(x, rows)
        if not self.scaled:
            return rows
        return rows * keras.ops.convert_to_tensor(math.sqrt(self.output_dim), rows.dtype)

    @property
    def makes_masks(self) -> bool:
        """Whether token ids of 0 are masked."""
        return self.mask_zero

    def compute_mask(self, inputs: Tensor, previous_mask: Tensor | None = None) -> Any:
        """Returns (B, T), False for id 0; None without `mask_zero`."""
        if not self.mask_zero:
            return None
        if keras.backend.is_float_dtype(inputs.dtype):  # hidden states, with reverse=True
            return previous_mask
        return keras.ops.not_equal(inputs, 0)

    def with_table(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, which reads the table outside of `call`.

        A table that lies in parts over several processes is gathered around the `entries` of its
        layer.
        """
        with using():
            return function(*args, **kwargs)

    def _adapters(self, is_output: bool) -> list[Any]:
        tables = [table for table in self.tables if table.is_output == is_output]
        return [table.adapter for table in tables if table.adapter is not None]

    def output_product(self, hidden: Tensor, training: bool) -> tuple[Any, Any, bool]:
        """Returns hidden states (..., D) and a table (V, D) whose product are the uncapped logits.

        The third result is True if the table has a gradient. Trained rows are not in the product.
        With an adapter, which may drop out in training, both have more columns.
        """
        for adapter in self._adapters(is_output=True):
            return *adapter.widened(hidden, training), True
        return hidden, self.output_table, self.output_table.trainable

    def logits(self, hidden: Tensor, training: bool = False) -> Any:
        """(..., D) -> (..., V), soft-capped; float32, or float64 for float64."""
        adapters = self._adapters(is_output=True)
        product = adapters[0](hidden, training) if adapters else _product(hidden, self.output_table)
        logits = keras.ops.cast(product, wide(hidden))
        if self.rows is not None and self.tie_weights:
            logits = self.rows.among(hidden, logits)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * keras.ops.tanh(logits / self.soft_cap)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes each table as Keras does, and the trained rows by name."""
        for place, table in self._originals().items():
            store[place] = table
        if self.rows is not None:
            store[trained.ROWS] = self.rows.values
            store[trained.IDS] = np.array(self.rows.ids, "int32")
        for table in self.tables:
            table.save_adapter(store)
        trained.save(self, store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of `save_own_variables`.

        A layer without rows writes those of the file into its table; rows are reset if the file
        has none.

        Raises:
            InputError: for a table of another size, or rows of other tokens.
        """
        if problem := self.misfit(store):
            raise InputError(f"{self.path}: {problem}")
        if not self.built:
            return
        for place, table in self._originals().items():
            table.assign(store[place])
        if trained.ROWS not in set(store.keys()):
            if self.rows is not None:
                self.rows.start()
        elif self.rows is not None:
            self.rows.values.assign(store[trained.ROWS])
        else:
            ids = np.asarray(store[trained.IDS]).tolist()
            trained.write(self, ids, np.asarray(store[trained.ROWS]))
        for table in self.tables:
            table.load_adapter(table.saved_adapter(store))
        trained.load(self, store)

    def misfit(self, store: Mapping[str, Any]) -> str | None:
        """Returns why the layer cannot load its arrays of a file, or None.

        Args:
            store: arrays by name, as `save_own_variables` writes them; for a layer that was never
                called, a file has none, as in Keras.
        """
        names = set(store.keys())
        if not self.built:
            return UNBUILT if names else None
        if "0" not in names:
            return "the file holds nothing for it"
        if (separate := "1" in names) == self.tie_weights:
            return f"the file holds {'an' if separate else 'no'} output layer of its own"
        for place, table in self._originals().items():
            here, there = tuple(table.shape), tuple(store[place].shape)
            if here != there:
                return f"{table.name} is {here}, in the file {there}"
        for table in self.tables:
            if problem := table.adapter_misfit(table.saved_adapter(store)):
                return problem
        for name, variable in trained.names(self, store).items():
            if tuple(store[name].shape) != tuple(variable.shape):
                shape = tuple(variable.shape)
                return f"{variable.name} is {shape}, {name} in the file another size"
        ids = tuple(np.asarray(store[trained.IDS]).tolist()) if trained.IDS in names else ()
        if ids and self.rows is not None and ids != self.rows.ids:
            here, there = trained.shown(self.rows.ids), trained.shown(ids)
            return f"its trained rows are {here}, the file's {there}"
        return None

    def _originals(self) -> dict[str, Any]:
        """Returns the tables by their places in a file; none before the layer is built."""
        if not self.built:
            return {}
        return {str(i): trained.original(self, name) for i, name in enumerate(self._tables())}

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, T) -> (B, T, D)."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(
        self, x: Tensor, reverse: bool = False, training: bool = False
    ) -> keras.KerasTensor:
        """Returns shape and dtype of the output of `call`."""
        if reverse:
            return keras.KerasTensor((*x.shape[:-1], self.input_dim), dtype=wide(x))
        return keras.KerasTensor((*x.shape, self.output_dim), dtype=self.compute_dtype)


def _product(hidden: Tensor, table: Any) -> Any:
    """(..., D) and (V, D) -> (..., V), in the dtype of the hidden states."""
    table = keras.ops.transpose(keras.ops.cast(table, hidden.dtype))
    # One row is left to the backend: it walks the table as it lies, which `dense` cannot know.
    product = keras.ops.matmul if hidden.shape[:-1] == (1,) else ops.dense
    return product(hidden, table)


def _resized(table: keras.Variable, input_dim: int) -> np.ndarray:
    """Returns a table's values for `input_dim` rows; new ones are the mean of all old ones."""
    values = np.asarray(keras.ops.convert_to_numpy(table.value), "float32")
    mean = values.mean(axis=0, dtype="float64").astype("float32")
    more = max(input_dim - len(values), 0)
    return np.concatenate([values[:input_dim], np.tile(mean, (more, 1))])


@keras.saving.register_keras_serializable(package="kmodels")
class PositionEmbedding(Layer):
    """A learned vector for each place in a row; names as in keras-hub.

    Args:
        sequence_length: rows of the table, and so the most tokens of a row.
        initializer: a Keras initializer.
        **kwargs: of `keras.layers.Layer`.

    Call:
        inputs (B, T, D), of which the shape alone counts; positions (T,) or (B, T) int or None for
        start_index, start_index + 1, ... -> (B, T, D), to be added to the inputs.

    Weights:
        embeddings (sequence_length, D).

    Raises:
        InputError: for rows that are longer than the table.
    """

    def __init__(
        self, sequence_length: int, initializer: InitializerLike = "glorot_uniform", **kwargs: Any
    ):
        super().__init__(**kwargs)
        check_whole("sequence_length", sequence_length)
        self.supports_masking = True
        self.sequence_length = sequence_length
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape: Shape) -> None:
        """Makes the table for the width of the inputs."""
        shape = (self.sequence_length, input_shape[-1])
        self.embeddings = self.add_parameter("embeddings", shape, self.initializer)

    def call(
        self, inputs: Tensor, start_index: Tensor | int = 0, positions: Tensor | None = None
    ) -> Any:
        """(B, T, D) -> (B, T, D)."""
        length = keras.ops.shape(inputs)[1]
        if positions is None:
            known = isinstance(length, int) and isinstance(start_index, int)
            if known and (last := start_index + length) > self.sequence_length:
                raise InputError(
                    f"a row of {last} tokens is longer than the {self.sequence_length} positions "
                    f"of {self.path}; cut it to that length"
                )
            positions = keras.ops.arange(length, dtype="int32") + start_index
        rows = keras.ops.take(self.embeddings, positions, axis=0)
        return keras.ops.broadcast_to(rows, keras.ops.shape(inputs))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape
