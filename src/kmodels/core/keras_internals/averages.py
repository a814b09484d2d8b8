"""Moving averages of the weights under gradient accumulation: one step for each update."""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import keras

from kmodels.core.keras_internals.optimizer import moving_averages, updates_next


def average_by_update(optimizer: keras.Optimizer) -> None:
    """Has an optimizer move its averages of the weights where it moves the weights.

    Keras moves an average at every batch, so with `gradient_accumulation_steps=k` it counts each
    state of the weights k times, and `ema_overwrite_frequency` writes it into the model between
    updates too. Its documentation says that an optimizer's variables change only where the weights
    do. After this call they do, and a run equals the one with batches k times as large.

    Args:
        optimizer: an optimizer of any class; one that does not accumulate, or keeps no average,
            stays as it is.
    """
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        average_by_update(inner)
    if not (optimizer.use_ema and optimizer.gradient_accumulation_steps):
        return
    # Methods of the instance, since its class names what a saved model is loaded with.
    optimizer._update_model_variables_moving_average = MethodType(_move_average, optimizer)
    if optimizer.ema_overwrite_frequency:
        optimizer._backend_apply_gradients = MethodType(_apply_and_overwrite, optimizer)


def _move_average(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> None:
    given = optimizer.ema_momentum
    # With 1 an average stays as it is.
    optimizer.ema_momentum = keras.ops.where(updates_next(optimizer), given, 1.0)
    try:
        type(optimizer)._update_model_variables_moving_average(optimizer, variables)
    finally:
        optimizer.ema_momentum = given


def _apply_and_overwrite(
    optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> None:
    given = optimizer.ema_overwrite_frequency
    optimizer.ema_overwrite_frequency = None
    try:
        type(optimizer)._backend_apply_gradients(optimizer, gradients, variables)
    finally:
        optimizer.ema_overwrite_frequency = given
    due = keras.ops.logical_and(updates_next(optimizer), (optimizer.iterations + 1) % given == 0)
    for variable, average in moving_averages(optimizer):
        if average is not None:
            variable.assign(keras.ops.where(due, average.value, variable.value))
