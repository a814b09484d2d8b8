"""The output layer of a causal model in training: its loss and accuracy without logits."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels import ops
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import MetricsLike, Tensor
from kmodels.layers.embedding import Embedding
from kmodels.ops.linear_cross_entropy import IGNORED, without_ignored
from kmodels.overrides import meshes
from kmodels.training.inside_step import InsideStep

ACCURACIES = ("accuracy", "acc", "sparse_categorical_accuracy")
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


class Head(InsideStep):
    """The output layer during training: cross-entropy straight from hidden states.

    An object of its own, so that Keras does not track the metrics a second time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reduction = REDUCTIONS[0]
        self._metrics: Sequence[Any] = ()

    def choose(self, loss: Any, metrics: MetricsLike, weighted_metrics: MetricsLike) -> None:
        """Decides from the arguments of `compile` whether logits can be left out."""
        weighted = list(weighted_metrics or ())
        known = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        settings = loss.get_config() if known else {}
        self.chosen = (
            settings.get("from_logits", False)
            and settings.get("ignore_class") is None
            and not settings.get("label_smoothing")
            and loss.reduction in REDUCTIONS
            and not metrics
            and all(type(m) is keras.metrics.SparseCategoricalAccuracy for m in weighted)
        )
        self._metrics = weighted if self.chosen else ()
        self._reduction = loss.reduction if self.chosen else REDUCTIONS[0]

    def loss(
        self,
        hidden: Tensor,
        embedding: Embedding,
        labels: Tensor,
        weights: Tensor | None,
        training: bool = True,
    ) -> Any:
        """Returns the loss as Keras reduces it, a float32 scalar; the metrics count along.

        Args:
            hidden: (B, T, D).
            embedding: the layer with the table.
            labels: (B, T) int; -100 does not count, neither in the sum nor in the mean.
            weights: (B, T), or None for ones.
            training: whether an adapter of the table drops out.
        """
        if weights is None:
            weights = keras.ops.ones_like(labels, dtype="float32")
        weights = meshes.merged(without_ignored(labels, keras.ops.cast(weights, "float32")))
        flat, labels = meshes.merged(hidden), meshes.merged(labels)
        total, hits = embedding.with_table(
            _cross_entropy, flat, labels, weights, embedding=embedding, training=training
        )
        count = keras.ops.sum(weights)
        share = keras.ops.divide_no_nan(hits, count)
        for metric in self._metrics:
            # A mean of hits, whose sum is known already.
            keras.metrics.Mean.update_state(metric, share, sample_weight=count)
        if self._reduction == "sum":
            return total
        if self._reduction != "mean_with_sample_weight":
            counted = keras.ops.not_equal(keras.ops.cast(labels, "int32"), IGNORED)
            count = keras.ops.cast(keras.ops.sum(keras.ops.cast(counted, "int32")), total.dtype)
        return keras_internals.part_of_loss(keras.ops.divide_no_nan(total, count))


def _cross_entropy(
    hidden: Tensor, labels: Tensor, weights: Tensor, embedding: Embedding, training: bool
) -> tuple[Any, Any]:
    """Returns the sum of the losses and of the hits, see `ops.linear_cross_entropy`."""
    rows = embedding.rows if embedding.tie_weights else None
    instead = {} if rows is None else {"rows": rows.values, "row_ids": rows.places()}
    hidden, table, is_trained = embedding.output_product(hidden, training)
    return ops.linear_cross_entropy(
        *(hidden, table, labels, weights),
        soft_cap=embedding.soft_cap,
        trainable_table=is_trained,
        **instead,
    )


def by_token(weights: Any, labels: Tensor) -> Any:
    """Returns weights of shape (B, T) from such, or from (B, 1); what is None stays so."""
    given, wanted = (tuple(getattr(each, "shape", ())) for each in (weights, labels))
    if len(wanted) != 2 or not given:
        return weights
    if len(given) == 1:
        raise InputError(
            f"sample_weight has the shape {given} beside targets of {wanted}; give one for each "
            "token, or for each row as (rows, 1), and no class_weight"
        )
    return weights * keras.ops.ones_like(labels, dtype=weights.dtype) if given[1] == 1 else weights


def accuracy(metric: object) -> Any:
    """Returns the metric that a usual name of it means; what is no such name stays."""
    if metric in ACCURACIES:
        return keras.metrics.SparseCategoricalAccuracy(name=metric)
    return metric
