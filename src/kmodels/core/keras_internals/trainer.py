"""The training loop: steps, losses, metrics and epochs of a model."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.losses.loss import scale_loss_for_distribution

from kmodels.core.types import Tensor, Tree


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback, as Keras' BackupAndRestore, had `fit` begin with."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` that is beginning start at this epoch; None takes that back."""
    model._initial_epoch = epoch


def symbolic_build(model: keras.Model, batch: Callable[[], Tree]) -> None:
    """Creates the metrics, losses, slots and layers that the first step of a model needs.

    Args:
        model: compiled.
        batch: returns (x, y, sample_weight), or arrays of the host; called only for shapes and
            dtypes that are needed.
    """
    model._symbolic_build(iterator=((0, 0, [_specs(batch())]) for _ in range(1)))


def _specs(batch: Tree) -> Any:
    return keras.tree.map_structure(lambda x: None if x is None else _spec(x), batch)


def _spec(x: Any) -> keras.KerasTensor:
    name = keras.backend.standardize_dtype(x.dtype)
    if name.endswith("64"):
        # JAX has 32 bits unless it is told otherwise, and warns of each array that should have 64.
        held: Any = keras.ops.convert_to_tensor(np.zeros((), name))
        name = keras.backend.standardize_dtype(held.dtype)
    return keras.KerasTensor(x.shape, name)


def metrics_built(model: keras.Model) -> bool:
    """Returns whether the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def unweighted_metrics(model: keras.Model) -> Any:
    """Returns the `metrics` given to `compile`, which ignore sample weights, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_metrics", None)


def weighted_metrics(model: keras.Model) -> Any:
    """Returns the `weighted_metrics` given to `compile`, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_weighted_metrics", None)


def part_of_loss(mean: Tensor) -> Any:
    """Returns the factor of a replica's mean in the loss: TensorFlow sums their gradients."""
    return scale_loss_for_distribution(mean)


def sync_values(model: keras.Model) -> None:
    """Puts what a running `fit` has computed into the variables, where Keras holds it elsewhere."""
    # Keras' steps on JAX carry the state outside of the variables during an epoch.
    if (sync := getattr(model, "jax_state_sync", None)) is not None:
        sync()


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric that averages the losses of the steps of a compiled model."""
    return model._loss_tracker


def set_loss_tracker(model: keras.Model, tracker: keras.Metric) -> None:
    """Puts another metric in the place of `loss_tracker`, as `compile` does."""
    # Around Keras' __setattr__, which refuses new state on a built model.
    object.__setattr__(model, "_loss_tracker", tracker)


def build_metrics(model: keras.Model, y: Tree, y_pred: Tree) -> None:
    """Makes the variables of the metrics given to `compile`, where they have none yet."""
    held = model._compile_metrics
    if held is not None and not held.built:
        held.build(y, y_pred)


def forget_metrics(model: keras.Model) -> None:
    """Lets go of the metrics of a `compile`, which Keras keeps where the next one has none."""
    model._compile_metrics = None


def additional_losses(model: keras.Model) -> list[Any]:
    """Returns what `add_loss` and regularizers add to the loss of a step, a scalar each."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


def predictions(model: keras.Model, x: Tree, training: bool) -> Any:
    """Returns the outputs of a step; `training` goes to a `call` that has such an argument."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def loss_of(
    model: keras.Model, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree, training: bool
) -> Any:
    """Returns `compute_loss` of a batch, a scalar; a subclass may define it without `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training)
