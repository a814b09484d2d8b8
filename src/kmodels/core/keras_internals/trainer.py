"""The training loop: steps, losses, metrics and epochs of a model.

Classes called Own... are first bases of models that take part in the steps of Keras' own trainers.
Each method of such a base does what Keras does there, and is called where Keras would do it: a
subclass overrides it and calls `super()`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
from keras.src.losses.loss import scale_loss_for_distribution

from kmodels.core.types import Tensor, Tree

if TYPE_CHECKING:
    _Model = keras.Model
else:
    _Model = object


@dataclass
class RunningFit:
    """A call of `fit`, as far as a callback that resumes it has to know it.

    Args:
        callbacks: that it calls, in order.
        iterator: the batches of its epochs; None in any other loop than that of kmodels.
    """

    callbacks: list[Any]
    iterator: Any = None


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback, as Keras' BackupAndRestore, had `fit` begin with."""
    return model._initial_epoch


def build_for(
    model: keras.Model, batches: Iterable[tuple[int, int, Any]] | None, batch: Tree = None
) -> None:
    """Has a model make what its first step needs, as Keras' `fit` does.

    Args:
        model: compiled.
        batches: gives what `fit` does of Keras' iterators: numbers of steps, and an iterator.
        batch: (x, y, sample_weight), in place of the first of them.
    """
    # TensorFlow builds within the first trace, except under a strategy.
    build = getattr(model, "_maybe_symbolic_build", model._symbolic_build)
    build(iterator=batches, data_batch=batch)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` that is beginning start at this epoch; None takes that back."""
    model._initial_epoch = epoch


def symbolic_build(model: keras.Model, batch: Tree = None, iterator: Any = None) -> None:
    """Makes the variables of metrics and losses, which Keras does in front of the first step.

    Args:
        model: compiled.
        batch: (x, y, sample_weight), the one to build for.
        iterator: Keras' own of an epoch, whose first batch is taken where none is given.
    """
    model._symbolic_build(iterator=iterator, data_batch=batch)


def metrics_built(model: keras.Model) -> bool:
    """Returns whether the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def unweighted_metrics(model: keras.Model) -> Any:
    """Returns the `metrics` given to `compile`, which ignore sample weights, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_metrics", None)


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


class OwnLoss(_Model):
    """A model that changes the loss of a step after Keras has computed it."""

    def loss_of_step(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tree = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of a batch, a scalar; the arguments are those of `compute_loss`."""
        return super()._compute_loss(x, y, y_pred, sample_weight, training)  # type: ignore[misc]

    def _compute_loss(
        self,
        x: Tree = None,
        y: Tree = None,
        y_pred: Tree = None,
        sample_weight: Tree = None,
        training: bool = True,
    ) -> Any:
        return self.loss_of_step(x, y, y_pred, sample_weight, training)


class OwnBuild(_Model):
    """A model that makes slots, averages and lazy layers itself, in front of its first step."""

    def build_step(self, iterator: Iterable[Any] | None = None, data_batch: Tree = None) -> None:
        """Builds for a batch, or for the first one of Keras' iterator of an epoch."""
        super()._symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _symbolic_build(
        self, iterator: Iterable[Any] | None = None, data_batch: Tree = None
    ) -> None:
        self.build_step(iterator, data_batch)


class OwnSpecs(_Model):
    """A model that says in which shapes and dtypes it is built for a batch."""

    def spec_of(self, x: Any) -> keras.KerasTensor:
        """Returns what stands for an array of a batch."""
        raise NotImplementedError

    def _symbolic_build(
        self, iterator: Iterable[Any] | None = None, data_batch: Tree = None
    ) -> None:
        # Keras reads a batch only where something has to be built.
        batches = ((n, m, map(self.specs_of, b)) for n, m, b in iterator or ())
        specs = None if data_batch is None else self.specs_of(data_batch)
        super()._symbolic_build(batches, specs)  # type: ignore[misc]

    def specs_of(self, batch: Tree) -> Any:
        """Returns what stands for a batch."""
        return keras.tree.map_structure(lambda x: None if x is None else self.spec_of(x), batch)


class OwnFirstBatch(_Model):
    """A model that chooses what is built, and for which batch, where Keras would rather not."""

    def build_where_needed(
        self, iterator: Iterable[Any] | None = None, data_batch: Tree = None
    ) -> None:
        """Builds what the first step needs; arguments as in `OwnBuild.build_step`."""
        super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _maybe_symbolic_build(
        self, iterator: Iterable[Any] | None = None, data_batch: Tree = None
    ) -> None:
        self.build_where_needed(iterator, data_batch)
