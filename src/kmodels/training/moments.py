"""What data and callbacks draw from and change: random generators, and the learning rate.

Hooks of callbacks are called again where a run is resumed within an epoch, so these are put back to
what they were when the epoch began, and after that to what they were when the state was saved.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kmodels.training import randomness, state
from kmodels.training.state import Arrays

_RATE = "rate"


def capture(optimizer: Any) -> Arrays:
    """Both as they are; a schedule's learning rate is none that a callback could change."""
    return randomness.capture() | state.copied(_rate(optimizer))


def restore(optimizer: Any, held: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture` gave."""
    randomness.restore(held)
    for name, variable in _rate(optimizer).items():
        if name in held:
            state.put(variable, held[name])


def without_rate(held: Arrays) -> Arrays:
    """The random generators alone."""
    return {name: values for name, values in held.items() if name != _RATE}


def _rate(optimizer: Any) -> dict[str, Any]:
    variable = state.slots(optimizer).get("learning_rate")
    return {} if variable is None else {_RATE: variable}
