"""The embedding table of a language model, which is also its output layer."""

import math
from collections.abc import Callable
from typing import Any

import keras

from kmodels import initializers, ops
from kmodels.layers.base import Layer
from kmodels.layers.parts import using


class Embedding(Layer):
    """Rows of a table, scaled; in reverse, logits from the same table.

    Args:
        vocabulary_size: rows V of the table.
        hidden_dim: width D.
        soft_cap: squashes logits to soft_cap * tanh(logits / soft_cap), or None.

    Call:
        token_ids (B, T) int -> (B, T, D): the rows times sqrt(D), which is rounded to the compute
        dtype first, as the original does. With reverse=True: hidden states (B, T, D) -> logits
        (B, T, V) in float32.

    Weights:
        embeddings (V, D).

    Attributes:
        entries: names of the methods that read the table, see `with_table`.
    """

    entries = ("call", "with_table")

    def __init__(
        self, vocabulary_size: int, hidden_dim: int, soft_cap: float | None = None, **kwargs: Any
    ):
        # No autocast: under a mixed policy it would cast the whole table to look up a few rows.
        super().__init__(autocast=False, **kwargs)
        self.vocabulary_size = vocabulary_size
        self.hidden_dim = hidden_dim
        self.soft_cap = soft_cap

    def build(self, _: Any = None) -> None:
        """Makes the table."""
        draw = initializers.normal(1.0 / math.sqrt(self.hidden_dim))
        shape = (self.vocabulary_size, self.hidden_dim)
        self.embeddings = self.add_parameter("embeddings", shape, draw)

    def call(self, x: Any, reverse: bool = False) -> Any:
        """(B, T) -> (B, T, D), or (B, T, D) -> (B, T, V)."""
        if reverse:
            return self.logits(x)
        rows = keras.ops.cast(keras.ops.take(self.embeddings, x, axis=0), self.compute_dtype)
        return rows * keras.ops.cast(math.sqrt(self.hidden_dim), rows.dtype)

    def with_table(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, which reads the table outside of `call`.

        What lies in parts over several processes is gathered around the `entries` of its layer.
        """
        with using():
            return function(*args, **kwargs)

    def logits(self, hidden: Any) -> Any:
        """(..., D) -> (..., V), float32, soft-capped."""
        table = keras.ops.transpose(keras.ops.cast(self.embeddings, hidden.dtype))
        # One row is left to the backend: it walks the table as it lies, which `dense` cannot know.
        product = keras.ops.matmul if hidden.shape[:-1] == (1,) else ops.dense
        logits = keras.ops.cast(product(hidden, table), "float32")
        if self.soft_cap is None:
            return logits
        return self.soft_cap * keras.ops.tanh(logits / self.soft_cap)

    def compute_output_spec(self, x: Any, reverse: bool = False) -> keras.KerasTensor:
        """Shape and dtype of what `call` gives."""
        if reverse:
            return keras.KerasTensor((*x.shape[:-1], self.vocabulary_size), dtype="float32")
        return keras.KerasTensor((*x.shape, self.hidden_dim), dtype=self.compute_dtype)
