"""The slots of an optimizer, and what it counts and accumulates."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

# Lists of an optimizer that are not slots: all its variables, and the weights themselves.
_NO_SLOTS = ("_variables", "_trainable_variables")


def built_for(optimizer: "keras.Optimizer") -> list[Any]:
    """Returns the variables that an optimizer has slots for."""
    return list(optimizer._trainable_variables)


def variable_index(optimizer: "keras.Optimizer", variable: "keras.Variable") -> int:
    """Returns the place of a variable among those that the optimizer was built for."""
    return optimizer._get_variable_index(variable)


def slot_lists(optimizer: "keras.Optimizer") -> Iterator[tuple[str, list[Any]]]:
    """Yields attribute and list of each kind of slot of a built optimizer.

    Keras keeps slots in lists in the order of `built_for`; their names differ from class to class.
    """
    count = len(optimizer._trainable_variables)
    for attribute, held in vars(optimizer).items():
        if isinstance(held, list | tuple) and len(held) == count and attribute not in _NO_SLOTS:
            yield attribute, list(held)


def moving_averages(optimizer: "keras.Optimizer") -> list[tuple[Any, Any]]:
    """Returns each weight of a built optimizer with its moving average; empty without any."""
    held = getattr(optimizer, "_model_variables_moving_average", None)
    return list(zip(optimizer._trainable_variables, held, strict=True)) if held else []


def adam_slots(optimizer: "keras.Optimizer", variable: "keras.Variable") -> tuple[Any, Any, Any]:
    """Returns the first and second moment of a variable in Keras' Adam, and the highest second.

    The last one is None but with `amsgrad`.
    """
    index = optimizer._get_variable_index(variable)
    highest = optimizer._velocity_hats[index] if optimizer.amsgrad else None
    return optimizer._momentums[index], optimizer._velocities[index], highest


def accumulated_gradient(optimizer: "keras.Optimizer", variable: "keras.Variable") -> Any:
    """Returns the variable that holds the sum of a variable's gradients since the last update."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def batches_seen(optimizer: "keras.Optimizer") -> Any:
    """Returns the count of batches; `iterations` counts updates where gradients are accumulated."""
    return optimizer._iterations


def updates_next(optimizer: "keras.Optimizer") -> Any:
    """Tells whether the next batch is the last one of its update, where gradients accumulate."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def strategy_of(optimizer: "keras.Optimizer") -> Any:
    """Returns the strategy of replicas under which an optimizer was made."""
    return optimizer._distribution_strategy


def unbuild(optimizer: "keras.Optimizer", restart: bool) -> None:
    """Takes an optimizer's slots away, so that `build` makes others.

    Args:
        optimizer: built; with one inside, as under "mixed_float16", that one, too.
        restart: begins the count of steps again.
    """
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        unbuild(inner, restart)
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in list(optimizer._variables):
        if id(variable) not in kept:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    if restart:
        optimizer._iterations.assign(0)
