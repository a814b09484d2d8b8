"""One training step on TensorFlow: each objective's turn under a tape, the whole in one graph."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kmodels.core import replicas_tensorflow
from kmodels.core.keras_internals import results_of
from kmodels.core.types import Tree
from kmodels.data.pipeline.arrays import rows
from kmodels.training.loop import Loop
from kmodels.training.objectives import LossFunction, Objectives, Results
from kmodels.training.step_tensorflow import check_replicated


def advance(objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree) -> Results:
    """Makes one step of each objective in turn."""
    # Replicas' gradients are summed, and each has the mean over its part of the batch.
    part: Any = None
    if replicas_tensorflow.inside() is not None:
        part = replicas_tensorflow.share(rows(batch)) / replicas_tensorflow.count()
    results: Results = {}
    for objective in objectives:
        values = [variable.value for variable in objective.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for value in values:
                tape.watch(value)
            loss, logs = objectives.loss(objective, losses[objective.name], batch, True)
            scaled = objective.optimizer.scale_loss(loss)
            if part is not None:
                scaled = scaled * tf.cast(part, scaled.dtype)
        gradients = [_dense(gradient) for gradient in tape.gradient(scaled, values)]
        if all(gradient is None for gradient in gradients):
            raise objectives.unmoved(objective)
        objective.optimizer.apply_gradients(zip(gradients, objective.variables, strict=True))
        results[objective.name] = loss, logs
    objectives.move_averages()
    return results


def _dense(gradient: tf.Tensor | tf.IndexedSlices | None) -> Any:
    """Returns an embedding's gradient as on the other backends.

    Keras' Adam moves only the rows of slices that a batch had, and the losses part.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape: Any = gradient.dense_shape
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])


def evaluate(objectives: Objectives, losses: Mapping[str, LossFunction], batch: Tree) -> Results:
    """Computes each objective's loss outside of training."""
    return {p.name: objectives.loss(p, losses[p.name], batch, False) for p in objectives}


def outline(
    objectives: Objectives,
    run: Callable[[Any], list[Any]],
    scope: keras.StatelessScope,
    batch: Tree,
) -> None:
    """Makes one forward pass of all objectives; only variables that are created in it stay."""
    del objectives
    with scope:
        run(batch)


class Step(Loop, keras.Model):
    """Keras' model whose steps are those above."""

    _players: Objectives
    _loss_functions: Mapping[str, LossFunction]

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' step."""
        for objective in self._players if self.train_function is None or force else ():
            check_replicated(objective.optimizer, self.distribute_strategy)
        return super().make_train_function(force)

    def train_step(self, data: Tree) -> Any:
        """Moves the variables; the logs."""
        batch = self._batch(data)
        results = advance(self._players, self._loss_functions, batch)
        return results_of(self._update_metrics(results, rows(batch)))

    def test_step(self, data: Tree) -> Any:
        """Returns the logs."""
        batch = self._batch(data)
        results = evaluate(self._players, self._loss_functions, batch)
        return results_of(self._update_metrics(results, rows(batch)))


if TYPE_CHECKING:
    from kmodels.training.train_step import TrainState


class State:
    """An empty state: the values stay in the variables."""

    def write_back(self) -> None:
        """Does nothing: the values are in the variables."""


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """Updates a state by a batch, and returns losses and logs by objective."""
    graphs: dict[Any, Callable[[Any], Results]] = {}

    def run(state: "TrainState", batch: Tree) -> Results:
        objectives: Objectives = state.objectives
        key = objectives, state.watch.state()
        if jit_compile is False:
            return advance(objectives, losses, batch)
        if key not in graphs:
            graphs[key] = tf.function(
                lambda batch: advance(objectives, losses, batch),
                autograph=False,
                reduce_retracing=True,
                jit_compile=jit_compile is True or None,
            )
        return graphs[key](batch)

    return run
