"""One step on TensorFlow: a graph that moves the variables themselves, on every replica."""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np
import tensorflow as tf

from kmodels.core import keras_internals, replicas_tensorflow, runtime
from kmodels.core.errors import InputError
from kmodels.core.types import Tree
from kmodels.data.pipeline.arrays import rows
from kmodels.training.normalization import batch_weight

_MEANS = ("sum_over_batch_size", "mean")
_TOGETHER = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


class TaskStep(keras.Model if TYPE_CHECKING else object):
    """First base of a task: its training step."""

    def make_train_function(self, force: bool = False) -> Any:
        """Prepares the next steps, see `check_replicated`."""
        if self.train_function is None or force:
            check_replicated(self.optimizer, self.distribute_strategy, self.loss)
        return super().make_train_function(force)

    def over_devices(self, weight: tf.Tensor) -> tuple[Any, int]:
        """Returns the sum of a scalar over the replicas, and the number of replicas."""
        replica = replicas_tensorflow.inside()
        if replica is None:
            return weight, 1
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, weight), replicas_tensorflow.count()

    def train_step(self, data: Tree) -> Any:
        """Moves the weights by one batch and returns the logs.

        Of replicas that share a batch, each counts by its rows of it.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_weights
        replicas = replicas_tensorflow.count()

        with tf.GradientTape() as tape:
            y_pred = keras_internals.predictions(self, x, training=True)
            loss = keras_internals.loss_of(self, x, y, y_pred, sample_weight, training=True)
            part = loss
            is_mean = all(_reduction(x) in _MEANS for x in keras.tree.flatten(self.loss))
            by_rows = batch_weight() is None and is_mean
            if replicas_tensorflow.inside() is not None and by_rows:
                part = loss * tf.cast(replicas_tensorflow.share(rows(x)), loss.dtype)
            if variables:
                part = self.optimizer.scale_loss(part)
        if variables:
            gradients = tape.gradient(part, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            warnings.warn("the model has no trainable weights", stacklevel=2)

        if replicas > 1:  # Keras divides it, for gradients are summed over the replicas
            loss = loss * tf.cast(replicas, loss.dtype)
        keras_internals.loss_tracker(self).update_state(loss, sample_weight=rows(x))
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def compute_metrics(
        self, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree = None
    ) -> dict[str, Any]:
        """Keras' metrics; those given by name are created outside of the graph of the step."""
        # A function that makes variables is traced once more, the whole step with it. TensorFlow
        # counts those of the thread that traces, in an init_scope too; only shapes are asked for.
        if tf.inside_function() and self.distribute_strategy.num_replicas_in_sync == 1:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(keras_internals.build_metrics, self, y, y_pred).result()
        return super().compute_metrics(x, y, y_pred, sample_weight)


def check_replicated(
    optimizer: keras.Optimizer, strategy: tf.distribute.Strategy, loss: object = None
) -> None:
    """Refuses settings that are wrong if each replica computes a part of a batch.

    Args:
        optimizer: that moves the weights, or None.
        strategy: strategy of the model.
        loss: as `compile` takes it.

    Raises:
        InputError: for such a setting.
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


def _reduction(loss: object) -> str:
    return getattr(loss, "reduction", _MEANS[0])


class Step:
    """Runs a step.

    Args:
        model: to train or evaluate, compiled.
        kind: "train", "test" or "predict".
        function: of `compiled`.
    """

    last_output = None

    def __init__(self, model: keras.Model, kind: str, function: Callable[..., Any]):
        self._function = function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Runs a step for each batch and returns the last logs, or all outputs of predict."""
        return self._function(batches)


def compiled(model: keras.Model, kind: str) -> Callable[[Any], Any]:
    """Returns a function of the batches of one execution: the last logs, or all outputs."""
    step, strategy = getattr(model, f"{kind}_step"), model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(step)  # by whose name TensorFlow counts traces
    def run(batch: Tree) -> Any:
        with _counted(model, kind, batch):
            return keras.tree.map_structure(reduced, strategy.run(step, args=(batch,)))

    def reduced(output: Any) -> Any:
        replicas = strategy.experimental_local_results(output)
        if len(replicas) == 1:
            return replicas[0]
        return _concatenated(replicas) if kind == "predict" else tf.reduce_mean(replicas, axis=0)

    one = run if model.run_eagerly else _by_ranks(run, jit_compile=model.jit_compile)
    if model.steps_per_execution == 1:
        return _trimmed(lambda batches: one(batches[0]))

    @tf.autograph.experimental.do_not_convert
    def several(batches: list[Any]) -> Any:
        # One graph: each batch is a call of the same function in it.
        outputs = [one(batch) for batch in batches]
        if kind != "predict":
            return outputs[-1]
        return keras.tree.map_structure(lambda *parts: _concatenated(parts), *outputs)

    return _trimmed(several if model.run_eagerly else _by_ranks(several))


@contextmanager
def _counted(model: keras.Model, kind: str, batch: Tree) -> Iterator[None]:
    """Weighs the loss of each of several outputs by the rows of a batch.

    Keras reads them from the static shape: a batch of a graph without one counts as one row.
    """
    alone = model.distribute_strategy.num_replicas_in_sync == 1
    # The first trace makes them, with the static shape of its batch.
    losses = [*keras_internals.output_losses(model)] if kind != "predict" and alone else []
    for loss in losses:
        loss.update_state = functools.partial(_update, loss, rows(batch))
    try:
        yield
    finally:
        for loss in losses:
            del loss.update_state


def _update(loss: keras.Metric, count: tf.Tensor, value: tf.Tensor, sample_weight: object) -> Any:
    return type(loss).update_state(loss, value, sample_weight=count)


def _by_ranks(function: Callable[[Any], Any], **settings: Any) -> Callable[[Any], Any]:
    """Returns a graph of the function for all batches of equal ranks.

    One graph for labels (rows,) after (rows, 1) would have labels of no rank, and no loss has.
    """
    graphs: dict[tuple[int | None, ...], Callable[[Any], Any]] = {}

    def call(batches: Any) -> Any:
        shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(batches)]
        ranks = tuple(getattr(shape, "rank", None) for shape in shapes)
        if ranks not in graphs:
            graphs[ranks] = tf.function(function, reduce_retracing=True, **settings)
        return graphs[ranks](batches)

    return call


def _trimmed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the function; the heap is trimmed after its first call, which traces it.

    Graphs are many small pieces, and the heap keeps their room: 55 MiB for a ViT-S/16, which the
    later steps would need in addition.
    """
    traced = False

    def call(batches: Any) -> Any:
        nonlocal traced
        outputs = function(batches)
        if not traced:
            traced = True
            runtime.malloc_trim()
        return outputs

    return call


def build_to_predict(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Does nothing: the first step creates missing variables."""


def joined(parts: Sequence[Any]) -> Any:
    """Returns the predictions of all batches as one array, ragged if their shapes differ."""
    whole = _concatenated(parts)
    return whole if isinstance(whole, tf.RaggedTensor | tf.SparseTensor) else whole.numpy()


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    if isinstance(parts[0], tf.RaggedTensor):
        return tf.concat(parts, axis=0)
    if not parts[0].shape.rank:
        return tf.stack(parts)
    if tf.executing_eagerly():
        shapes = np.array([part.shape[1:].as_list() for part in parts])
        differing = np.flatnonzero(np.ptp(shapes, axis=0))
        if differing.size:
            ragged: Any = tf.RaggedTensor
            rank = int(differing[-1]) + 1
            parts = [ragged.from_tensor(part, ragged_rank=rank) for part in parts]
    return tf.concat(parts, axis=0)
