"""The loss of every pixel, of which some may have no label."""

from typing import Any

import keras

from kmodels.core.types import Tensor


@keras.saving.register_keras_serializable(package="kmodels")
class PixelCrossentropy(keras.losses.Loss):
    """Cross-entropy of whole-number masks from logits; pixels of `ignore_class` do not count.

    The mean is over the pixels that have a label, as torch's `cross_entropy(ignore_index=...)`
    takes it: an image of which half is labelled does not learn half as much. Of a batch without any
    it is 0. Keras' `SparseCategoricalCrossentropy(ignore_class=...)` gives the same number, on
    JAX through one-hot labels: an array as large as the logits, which are the largest of a step.

    Over several devices the mean is that of the whole batch on JAX; on torch and TensorFlow each
    device averages over the pixels of its own rows.

    Args:
        ignore_class: label of the pixels that do not count; None where all do.
        reduction: as of `keras.losses.Loss`; None gives each pixel's loss.
        name: name of the loss.
        **kwargs: of `keras.losses.Loss`.

    Call:
        y_true: whole numbers (B, H, W), or (B, H, W, 1).
        y_pred: logits (B, H, W, classes).
        sample_weight: (B,) or (B, H, W), or None. It scales losses, and the mean is divided by the
            number of labeled pixels all the same, as Keras does.

        It gives a scalar; without reduction (B, H, W).
    """

    def __init__(
        self,
        ignore_class: int | None = 255,
        reduction: str | None = "sum_over_batch_size",
        name: str = "pixel_crossentropy",
        **kwargs: Any,
    ):
        super().__init__(name=name, reduction=reduction, **kwargs)
        self.ignore_class = ignore_class

    def __call__(self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None) -> Any:
        """Returns the loss; Keras' own call would divide by all pixels."""
        ops = keras.ops
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        losses = self.call(y_true, y_pred)
        if sample_weight is not None:
            given = ops.cast(ops.convert_to_tensor(sample_weight), losses.dtype)
            losses = losses * (ops.reshape(given, (-1, 1, 1)) if len(given.shape) < 3 else given)
        if self.reduction is None or self.reduction == "none":
            return losses
        total = ops.sum(losses)
        if self.reduction == "sum":
            return total
        # By Keras' rule weights are no part of it: rows that fill a batch up count as rows.
        count = ops.sum(ops.cast(self._labelled(self._masks(y_true, y_pred)), losses.dtype))
        return total / ops.maximum(count, 1.0)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Any:
        """Returns the loss of each pixel, (B, H, W); 0 of those without a label."""
        ops = keras.ops
        masks, logits = self._masks(y_true, y_pred), ops.cast(y_pred, self.dtype)
        there = self._labelled(masks)
        labels = ops.where(there, masks, 0)
        own = ops.take_along_axis(logits, ops.expand_dims(labels, -1), axis=-1)
        losses = ops.logsumexp(logits, axis=-1) - ops.squeeze(own, -1)
        return ops.where(there, losses, 0.0)

    def _labelled(self, masks: Tensor) -> Any:
        if self.ignore_class is None:
            return keras.ops.ones_like(masks, dtype="bool")
        return keras.ops.not_equal(masks, self.ignore_class)

    @staticmethod
    def _masks(y_true: Tensor, y_pred: Tensor) -> Any:
        masks = keras.ops.cast(y_true, "int32")
        return keras.ops.squeeze(masks, -1) if len(masks.shape) == len(y_pred.shape) else masks

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {**super().get_config(), "ignore_class": self.ignore_class}
