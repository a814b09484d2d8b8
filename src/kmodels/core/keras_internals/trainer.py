"""The training loop: steps, losses, metrics and epochs of a model.

Classes called Own... are first bases of models that take part in the steps of Keras' own trainers.
Each method of such a base does what Keras does there, and is called where Keras would do it: a
subclass overrides it and calls `super()`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
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
        iterator: Keras' own, which counts the steps of its epochs; None in a loop of your own.
        code: code of the function that ends where the `fit` does; None where the callback is told.
    """

    callbacks: list[Any]
    iterator: Any = None
    code: CodeType | None = None


@contextmanager
def note_iterator(model: keras.Model, fit: RunningFit) -> Iterator[None]:
    """Notes in `fit` what counts the steps of Keras' `fit` of a model, called in the block.

    Keras has the model build itself for it, before any callback is called.
    """
    name = "_symbolic_build"
    if hasattr(model, "_maybe_symbolic_build"):  # TensorFlow's comes before it
        name = "_maybe_symbolic_build"
    build = getattr(model, name)

    def noting(iterator: Iterable[Any] | None = None, data_batch: Tree = None) -> None:
        del vars(model)[name]
        fit.iterator = iterator
        build(iterator, data_batch)

    vars(model)[name] = noting
    try:
        yield
    finally:
        vars(model).pop(name, None)


# The loop of kmodels in place of Keras': `training/loop.py`. Both exist for a while.
OWN_LOOP = os.environ.get("KMODELS_OWN_LOOP", "0") == "1"


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


def step_output(model: keras.Model) -> Any:
    """Returns an array that the last step of a running `fit` returned on JAX, or None."""
    state = getattr(model, "_jax_state", None) or {}
    parts = (state.get(f"{name}_variables") for name in ("metrics", "optimizer", "trainable"))
    return next((part[-1] for part in parts if part), None)


def forget_step(model: keras.Model) -> None:
    """Lets go of what a step outside of `fit` left, which Keras would write back on JAX."""
    if getattr(model, "_jax_state", None) is not None:
        model._jax_state = None


def symbolic_build(model: keras.Model, batch: Tree = None, iterator: Any = None) -> None:
    """Makes the variables of metrics and losses, which Keras does in front of the first step.

    Args:
        model: compiled.
        batch: (x, y, sample_weight), the one to build for.
        iterator: Keras' own of an epoch, whose first batch is taken where none is given.
    """
    model._symbolic_build(iterator=iterator, data_batch=batch)


@contextmanager
def keeping_values(model: keras.Model) -> Iterator[None]:
    """Gives variables their values back where `fit`, `evaluate` or `predict` fails.

    On JAX Keras takes the values from the variables while steps run, and a failing first step would
    leave the model without any. Holding them costs nothing: a step donates what it replaces.
    """
    if not hasattr(model, "jax_state_sync"):
        yield
        return
    held = [(v, v._value) for v in (*model.variables, *model.metrics_variables)]
    try:
        yield
    except BaseException:
        sync_values(model)
        model._jax_state = None
        for variable, value in held:
            if variable._value is None and not getattr(value, "is_deleted", bool)():
                variable._value = value
        raise


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


class OwnCompile(_Model):
    """A model that may call its own `compile` when it is first trained or evaluated."""

    def before_use(self) -> None:
        """Is called before Keras looks whether `compile` was called."""

    def _assert_compile_called(self, method_name: str | None = None) -> None:
        self.before_use()
        super()._assert_compile_called(method_name)  # type: ignore[misc]


class NoTrainableWarning:
    """A model whose steps follow what is made trainable, without another `compile`."""

    def _warn_if_trainable_state_changed(self) -> None:
        """Does nothing: Keras would say that the change waits for `compile`."""


class NoKerasDDP:
    """A model whose gradients are reduced by its own step."""

    def _initialize_ddp(self) -> None:
        """Does nothing: Keras 3.16 would reduce what is reduced already."""
