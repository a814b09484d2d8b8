"""Pooling: one vector for each text, made of the hidden states of its tokens."""

from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.models.blocks.inputs import Reordered
from kmodels.ops._wide import wide

# sentence-transformers' names of the modes.
MEAN, FIRST, LAST = "mean", "cls", "lasttoken"
MODES = (MEAN, FIRST, LAST)
# keras-hub's names of them.
HUB_MODES = {"last": LAST, "mean": MEAN}


@keras.saving.register_keras_serializable(package="kmodels")
class TokenPooling(keras.Operation):
    """The mean of the hidden states of all tokens, or those of the first or the last.

    Args:
        mode: "mean", "cls" for the first token, or "lasttoken".

    Call:
        hidden (B, T, D), mask (B, T) int, 0 for padding, or None -> (B, D), at least
        float32. A row without tokens gives zeros as its mean.

    Raises:
        InputError: for another mode.
    """

    def __init__(self, mode: str = MEAN):
        super().__init__()
        if mode not in MODES:
            raise InputError(f"pooling is {mode!r}; the model supports {', '.join(MODES)}")
        self.mode = mode

    def call(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        """(B, T, D), (B, T) -> (B, D)."""
        hidden = keras.ops.cast(hidden, wide(hidden))
        if mask is None:
            if self.mode == MEAN:
                return keras.ops.mean(hidden, axis=1)
            return hidden[:, 0] if self.mode == FIRST else hidden[:, -1]
        is_token = keras.ops.cast(mask, "bool")
        if self.mode == MEAN:
            weights = keras.ops.cast(is_token, hidden.dtype)
            total = keras.ops.einsum("bt,btd->bd", weights, hidden)
            return total / keras.ops.maximum(keras.ops.sum(weights, axis=1, keepdims=True), 1.0)
        count = keras.ops.cast(is_token, "int32")
        if self.mode == LAST:
            # The first place by which all tokens are counted is that of the last one.
            count = keras.ops.cumsum(count, axis=1)
        place = keras.ops.argmax(count, axis=1, keepdims=True)
        return Reordered()(hidden, keras.ops.cast(place, "int32"))[:, 0]

    def compute_output_spec(
        self, hidden: keras.KerasTensor, mask: keras.KerasTensor | None = None
    ) -> keras.KerasTensor:
        """Returns the shape and the dtype of the vectors."""
        return keras.KerasTensor((hidden.shape[0], hidden.shape[2]), dtype=wide(hidden))


@keras.saving.register_keras_serializable(package="kmodels")
class UnitLength(keras.Operation):
    """Divides vectors by their length; those of length 0 stay, and pass finite gradients.

    Call:
        x (..., D) -> (..., D).
    """

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        square = keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True)
        # As in PyTorch's normalize, whose shortest length is 1e-12.
        return x * keras.ops.rsqrt(keras.ops.maximum(square, 1e-24))

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the shape and the dtype of x."""
        return keras.KerasTensor(x.shape, dtype=x.dtype)
