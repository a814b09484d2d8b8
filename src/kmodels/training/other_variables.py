"""An optimizer whose model trains other variables than it was built for."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from kmodels.checkpoint.state import slots
from kmodels.core import keras_internals


def follow_variables(optimizer: keras.Optimizer, variables: Sequence[Any]) -> None:
    """Builds an optimizer for these variables, or rebuilds it if it had others.

    Keras chooses the trained variables in `compile`. If only fewer are trained now, their slots
    continue. If other variables are trained, all slots start over as after `compile`, with a
    warning if steps were made: with slots at zero and a high count of steps, Adam's first steps
    would be too large.

    Args:
        optimizer: an optimizer of Keras, built or not.
        variables: the variables that the model trains now.
    """
    if not optimizer.built:
        optimizer.build(variables)
        return
    before = [id(variable) for variable in keras_internals.built_for(optimizer)]
    now = [id(variable) for variable in variables]
    # JAX takes them by their order.
    if before == now:
        return
    goes_on = set(now) <= set(before)
    steps = int(optimizer.iterations)
    values = {name: slot.value for name, slot in slots(optimizer).items()} if goes_on else {}
    keras_internals.unbuild(optimizer, restart=not goes_on)
    optimizer.build(variables)
    for name, slot in slots(optimizer).items():
        if name in values:
            slot.assign(values[name])
    if steps and not goes_on:
        warnings.warn(
            f"{optimizer.name} has made {steps} steps for {len(before)} variables, and the model "
            f"now trains {len(variables)}, others among them: its slots and its count of steps "
            "start over; call compile after such a change to choose an optimizer for it",
            stacklevel=2,
        )
