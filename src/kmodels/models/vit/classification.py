"""Share the defaults of `compile` and a new head among classifiers of images."""

from typing import Any, Self

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import LossLike, MetricsLike, OptimizerLike
from kmodels.layers import block_compile as compiling
from kmodels.task import Task
from kmodels.training.metrics import SparseAccuracy
from kmodels.training.sparse_labels import SparseLabels


class ImageClassifier(SparseLabels, keras_internals.ClonedAs, Task):
    """The base of classifiers of images; an `__init__` sets what follows.

    Attributes:
        num_classes: number of logits; 0 for no head.
        pooling: how tokens become one vector.
        head_dtype: policy of the head.
    """

    num_classes: int
    pooling: str
    head_dtype: Any

    def compile_by_default(self) -> None:
        """Compiles with the defaults of `compile`, where the model has a head that they fit."""
        # A model without values has no place for those of an optimizer; its loader calls again.
        if (
            keras_internals.in_stateless_scope()
            or not self.num_classes
            or self._default_loss() is None
        ):
            return
        # On an accelerator torch.compile takes the blocks only if the user asks for it.
        self.compile(jit_compile="auto" if compiling.declines() else False)

    @property
    def output_dense(self) -> Any:
        """The layer that gives the logits, by keras-hub's name; None without a head."""
        return self.get_layer("logits") if self.num_classes else None

    @property
    def activation(self) -> Any:
        """The activation of the logits."""
        return keras.activations.get(self.settings["activation"])

    @property
    def number_of_labels(self) -> int:
        """The number of classes."""
        return self.num_classes

    def compile(
        self,
        optimizer: OptimizerLike = "auto",
        loss: LossLike = "auto",
        loss_weights: MetricsLike = None,
        metrics: MetricsLike = "auto",
        weighted_metrics: MetricsLike = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Keras' `compile`, with keras-hub's defaults for whole-number labels.

        Args:
            optimizer: "auto" is Adam with a learning rate of 5e-5.
            loss: "auto" is cross-entropy of whole-number labels, from logits or, with a "softmax",
                from probabilities, in which labels of -100 do not count; with a "sigmoid" it is
                binary cross-entropy of 0 and 1.
            loss_weights: as in Keras.
            metrics: "auto" is the accuracy that belongs to the loss, if that is "auto" too; beside
                a loss of your own it is none.
            weighted_metrics: as in `Task.compile`, like all that follow.
            run_eagerly: see there.
            steps_per_execution: see there.
            jit_compile: see there.
            auto_scale_loss: see there.

        Raises:
            InputError: for "auto" where the activation is none of these.
        """
        if isinstance(metrics, str) and metrics == "auto":
            automatic = isinstance(loss, str) and loss == "auto"
            metrics = [self._default_metric()] if automatic else None
        if isinstance(optimizer, str) and optimizer == "auto":
            optimizer = keras.optimizers.Adam(5e-5)
        if isinstance(loss, str) and loss == "auto":
            loss = self._default_loss()
            if loss is None:
                raise InputError(
                    f"no loss is known for the activation {self.settings['activation']!r}; give "
                    'compile a loss, or choose activation=None, "softmax" or "sigmoid"'
                )
        keras_internals.forget_metrics(self)
        super().compile(
            optimizer,
            loss,
            loss_weights,
            metrics,
            weighted_metrics,
            run_eagerly,
            steps_per_execution,
            jit_compile,
            auto_scale_loss,
        )

    def _default_loss(self) -> Any:
        if self.activation is keras.activations.sigmoid:
            return keras.losses.BinaryCrossentropy()
        if self.activation in (keras.activations.softmax, keras.activations.linear):
            logits = self.activation is keras.activations.linear
            return keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
        return None

    def _default_metric(self) -> Any:
        if self.activation is keras.activations.sigmoid:
            return keras.metrics.BinaryAccuracy()
        return SparseAccuracy(name="sparse_categorical_accuracy")

    def with_head(self, num_classes: int, pooling: str | None = None) -> Self:
        """Returns a classifier with a new head over the same backbone, whose weights they share.

        Args:
            num_classes: number of classes of the new head; 0 for none.
            pooling: as in the class; None keeps it.
        """
        policy = self.head_dtype
        settings = {**self.settings, "num_classes": num_classes}
        settings["pooling"] = pooling or self.pooling
        make: Any = type(self)
        return make(self.backbone, preprocessor=self.preprocessor, head_dtype=policy, **settings)
