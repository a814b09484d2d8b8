"""The training loop: steps, losses, metrics and epochs of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keras.src.losses.loss import scale_loss_for_distribution


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes the `fit` that is beginning start at this epoch; None takes that back."""
    model._initial_epoch = epoch


def step_output(model: Any) -> Any:
    """Returns an array that the last step of a running `fit` returned on JAX, or None."""
    state = getattr(model, "_jax_state", None) or {}
    parts = (state.get(f"{name}_variables") for name in ("metrics", "optimizer", "trainable"))
    return next((part[-1] for part in parts if part), None)


def forget_step(model: Any) -> None:
    """Lets go of what a step outside of `fit` left, which Keras would write back on JAX."""
    if getattr(model, "_jax_state", None) is not None:
        model._jax_state = None


def symbolic_build(model: Any, batch: Any = None, iterator: Any = None) -> None:
    """Makes the variables of metrics and losses, which Keras does in front of the first step.

    Args:
        model: compiled.
        batch: (x, y, sample_weight), the one to build for.
        iterator: Keras' own of an epoch, whose first batch is taken where none is given.
    """
    model._symbolic_build(iterator=iterator, data_batch=batch)


@contextmanager
def keeping_values(model: Any) -> Iterator[None]:
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


def metrics_built(model: Any) -> bool:
    """Returns whether the metrics given to `compile` have their variables."""
    if (built := getattr(model, "metrics_built", None)) is not None:
        return built
    return model._compile_metrics is None or model._compile_metrics.built


def unweighted_metrics(model: Any) -> Any:
    """Returns the `metrics` given to `compile`, which ignore sample weights, or None."""
    given = getattr(model, "_compile_metrics", None)
    return getattr(given, "_user_metrics", None)


def part_of_loss(mean: Any) -> Any:
    """Returns the factor of a replica's mean in the loss: TensorFlow sums their gradients."""
    return scale_loss_for_distribution(mean)


def sync_values(model: Any) -> None:
    """Puts what a running `fit` has computed into the variables, where Keras holds it elsewhere."""
    # Keras' steps on JAX carry the state outside of the variables during an epoch.
    if (sync := getattr(model, "jax_state_sync", None)) is not None:
        sync()


def loss_tracker(model: Any) -> Any:
    """Returns the metric that averages the losses of the steps of a compiled model."""
    return model._loss_tracker


def set_loss_tracker(model: Any, tracker: Any) -> None:
    """Puts another metric in the place of `loss_tracker`, as `compile` does."""
    # Around Keras' __setattr__, which refuses new state on a built model.
    object.__setattr__(model, "_loss_tracker", tracker)


def build_metrics(model: Any, y: Any, y_pred: Any) -> None:
    """Makes the variables of the metrics given to `compile`, where they have none yet."""
    held = model._compile_metrics
    if held is not None and not held.built:
        held.build(y, y_pred)


def forget_metrics(model: Any) -> None:
    """Lets go of the metrics of a `compile`, which Keras keeps where the next one has none."""
    model._compile_metrics = None


def additional_losses(model: Any) -> list[Any]:
    """Returns what `add_loss` and regularizers add to the loss of a step, a scalar each."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]
