"""The training step on TensorFlow."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from kmodels.core import keras_internals, replicas_tensorflow
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.training.loop import Loop

_MEANS = ("sum_over_batch_size", "mean")
_TOGETHER = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


class Model(keras_internals.OwnLoss, Loop, keras.Model):
    """Keras' model, whose step counts the parts of a batch that replicas share."""

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' step."""
        made = self.train_function
        if made is None or force:
            check_replicated(self.optimizer, self.distribute_strategy, self.loss)
        return super().make_train_function(force)

    def compute_metrics(
        self, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree = None
    ) -> dict[str, Any]:
        """Keras' metrics; those given by name are made beside the graph of the step."""
        # A function that makes variables is traced once more, the whole step with it. TensorFlow
        # counts those of the thread that traces, in an init_scope too; only shapes are asked for.
        if tf.inside_function() and self.distribute_strategy.num_replicas_in_sync == 1:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(keras_internals.build_metrics, self, y, y_pred).result()
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def loss_of_step(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tree = None,
        training: bool = True,
    ) -> Any:
        """Keras' loss; of replicas that share a batch, each counts by its rows of it."""
        loss = super().loss_of_step(x, y, y_pred, sample_weight, training)
        if not training or replicas_tensorflow.inside() is None or not _is_mean(self.loss):
            return loss
        rows = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
        counted = loss * tf.cast(replicas_tensorflow.share(rows), loss.dtype)
        # The value is what the averages of the logs weigh by rows themselves.
        return counted + tf.stop_gradient(loss - counted)


def check_replicated(
    optimizer: keras.Optimizer, strategy: tf.distribute.Strategy, loss: object = None
) -> None:
    """Looks for what would be wrong where replicas each compute a part of a batch.

    Args:
        optimizer: that moves the weights, or None.
        strategy: strategy of the model.
        loss: as `compile` takes it.

    Raises:
        InputError: where there is such a thing.
    """
    if strategy.num_replicas_in_sync == 1 or optimizer is None:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if keras_internals.strategy_of(inner) is not strategy:
        raise InputError(f"{inner.name} was made before distribute; make it after")
    named = [name for name in _TOGETHER if getattr(inner, name, None)]
    if named and not hasattr(inner, "looks_at_sums"):
        raise InputError(
            f"{type(inner).__name__} with {named[0]} looks at the gradients of each device alone; "
            "take kmodels.training.AdamW or SGD, with clip_norm or accumulate"
        )
    if inner is not optimizer and getattr(inner, "looks_at_sums", False):
        raise InputError(
            "clip_norm, accumulate and skip_non_finite do not go with the scaled loss of "
            "mixed_float16 on several devices; use mixed_bfloat16"
        )
    if any(_reduction(part) == "mean_with_sample_weight" for part in keras.tree.flatten(loss)):
        raise InputError(
            "a loss with reduction='mean_with_sample_weight' would divide by the weights of each "
            "device alone; use 'sum_over_batch_size', with weights whose mean is 1"
        )


def _is_mean(loss: object) -> bool:
    return all(_reduction(part) in _MEANS for part in keras.tree.flatten(loss))


def _reduction(loss: object) -> str:
    return getattr(loss, "reduction", _MEANS[0])
