"""Metrics that leave out ignored labels."""

from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.training.sparse_labels import like, mask_ignored


@keras.saving.register_keras_serializable(package="kmodels")
class MeanIoU(keras.metrics.MeanIoU):
    """Keras' `MeanIoU` with exact counts for any number of pixels on every backend.

    It sums counts of pixels over batches, devices and processes, and divides once. Keras' own casts
    labels to a dtype that JAX does not have by default, which warns at each first batch; its counts
    are int32 on JAX and torch, and a data set of photographs has more than 2 ** 31 pixels; and it
    takes weights of pixels, but none of images.

    Args:
        num_classes: number of classes.
        name: name of the metric.
        dtype: of the counts.
        ignore_class: label of pixels that are ignored; None if all count.
        sparse_y_true: labels are whole numbers; False for one-hot ones.
        sparse_y_pred: predictions are whole numbers; False for logits or probabilities, which is
            the default here.
        axis: axis of the classes in one-hot labels and logits.

    Call:
        y_true: (B, H, W), or (B, H, W, 1).
        y_pred: (B, H, W, classes).
        sample_weight: (B,), (B, H, W), or None.

        The result is the mean over the classes that masks or predictions have.
    """

    def __init__(
        self,
        num_classes: int,
        name: str = "mean_iou",
        dtype: str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ):
        super().__init__(
            num_classes=num_classes,
            name=name,
            dtype=dtype or "float32",
            ignore_class=ignore_class,
            sparse_y_true=sparse_y_true,
            sparse_y_pred=sparse_y_pred,
            axis=axis,
        )

    def update_state(
        self, y_true: Tensor, y_pred: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        """Adds the pixels of a batch to the counts.

        Args:
            y_true: masks.
            y_pred: predictions.
            sample_weight: weights of images or pixels, or None.
        """
        ops, classes = keras.ops, self.num_classes
        if not self.sparse_y_true:
            y_true = ops.argmax(y_true, axis=self.axis)
        if not self.sparse_y_pred:
            y_pred = ops.argmax(y_pred, axis=self.axis)
        rows = ops.shape(y_true)[0]
        true = ops.reshape(ops.cast(y_true, "int32"), (rows, -1))
        said = ops.reshape(ops.cast(y_pred, "int32"), (rows, -1))
        there = ops.ones_like(true, dtype="bool")
        for numbers in (true, said):
            there = ops.logical_and(there, (numbers >= 0) & (numbers < classes))
        if self.ignore_class is not None:
            there = ops.logical_and(there, true != self.ignore_class)
        # Whole numbers: float32 cannot count beyond 2 ** 24 one by one.
        weights = ops.cast(there, "int32")
        if sample_weight is not None:
            row_weights = ops.reshape(ops.cast(sample_weight, self.dtype), (rows, -1))
            weights = row_weights * ops.cast(there, self.dtype)
        cells = ops.where(there, true * classes + said, 0)
        # Not `segment_sum`, which on torch waits for the device and counts in float32.
        counts = ops.scatter_update(
            ops.zeros((classes**2,), ops.dtype(weights)),
            ops.reshape(cells, (-1, 1)),
            ops.reshape(weights, (-1,)),
            reduction="add",
        )
        counts = ops.reshape(ops.cast(counts, self.dtype), (classes, classes))
        self.total_cm.assign_add(counts)


@keras.saving.register_keras_serializable(package="kmodels")
class SparseAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """Keras' `SparseCategoricalAccuracy` that does not count labels of -100."""

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Any = None) -> None:
        """Counts a batch."""
        y_true, _, counted = mask_ignored(y_true, y_pred, None)
        weights = keras.ops.cast(counted, self.dtype)
        if sample_weight is not None:
            weights = weights * like(sample_weight, counted, self.dtype)
        super().update_state(y_true, y_pred, weights)
