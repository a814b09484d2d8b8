"""Losses of the pairs of a batch, in which a row is a negative of all others."""

from typing import Any

import keras

from kmodels.core.types import Tensor

# As a logit, so far below all cosines that its share of a softmax is 0, and finite.
ABSENT = -1e9


class PairLoss(keras.losses.Loss):
    """A loss that is told which rows of a batch are there.

    Call:
        y_true: not read; `call` gets (B,) in its place, 0 for rows that weigh nothing.
        y_pred: what the model gives for the pairs.
        sample_weight: (B,), weights of the rows, or None; a row that weighs nothing is not among
            the negatives of the others either.
    """

    def __call__(
        self, y_true: Tensor | None, y_pred: Tensor, sample_weight: Tensor | None = None
    ) -> Any:
        """Returns the loss; Keras' own call would not tell `call` which rows weigh nothing."""
        rows = keras.ops.shape(y_pred)[0]
        if sample_weight is not None:
            sample_weight = keras.ops.reshape(keras.ops.cast(sample_weight, self.dtype), (rows,))
            there = keras.ops.cast(keras.ops.greater(sample_weight, 0.0), self.dtype)
        else:
            there = keras.ops.ones((rows,), dtype=self.dtype)
        return super().__call__(there, y_pred, sample_weight)
