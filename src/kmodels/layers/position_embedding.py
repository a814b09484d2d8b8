"""Learned positions of the tokens of a row."""

from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import InitializerLike, Tensor
from kmodels.layers.base import Layer, Shape


@keras.saving.register_keras_serializable(package="kmodels")
class PositionEmbedding(Layer):
    """A learned vector for each place in a row; names as in keras-hub.

    Args:
        sequence_length: rows of the table, and so the most tokens of a row.
        initializer: as Keras takes it.
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
        found = keras.ops.take(self.embeddings, positions, axis=0)
        return keras.ops.broadcast_to(found, keras.ops.shape(inputs))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape
