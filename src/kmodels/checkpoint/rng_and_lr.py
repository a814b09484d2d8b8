"""What data and callbacks draw from and change: random generators, and the learning rate.

Hooks of callbacks are called again where a run is resumed within an epoch, so these are put back to
what they were when the epoch began, and after that to what they were when the state was saved.
"""

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from kmodels.checkpoint import rng, state
from kmodels.checkpoint.state import Arrays

_RATE, _SLOT = "rate", "learning_rate"


def capture(optimizer: Any) -> Arrays:
    """Both as they are; a schedule's learning rate is none that a callback could change."""
    return rng.capture() | capture_rates(optimizer)


def capture_rates(optimizer: Any) -> Arrays:
    """The learning rates alone, where they are numbers."""
    return state.whole(_rates(optimizer))


def restore(optimizer: Any, held: Mapping[str, np.ndarray]) -> None:
    """Puts back what `capture` gave."""
    rng.restore(held)
    restore_rates(optimizer, held)


def restore_rates(optimizer: Any, held: Mapping[str, np.ndarray]) -> None:
    """Puts back those learning rates that are held."""
    for name, variable in _rates(optimizer).items():
        if name in held:
            state.put(variable, held[name])


def without_rate(held: Arrays) -> Arrays:
    """The random generators alone."""
    return {name: values for name, values in held.items() if not _is(name, _RATE)}


def of_slots(held: Arrays, slots: Container[str]) -> Arrays:
    """Those learning rates whose slots are named."""
    return {name: values for name, values in held.items() if _slot(name) in slots}


def rates(held: Arrays) -> Arrays:
    """The learning rates alone, by the names that they have among the slots."""
    return {_slot(name): values for name, values in held.items() if _is(name, _RATE)}


def _rates(optimizer: Any) -> dict[str, Any]:
    return {
        name.removesuffix(_SLOT) + _RATE: variable
        for name, variable in state.slots(optimizer).items()
        if _is(name, _SLOT)
    }


def _slot(rate: str) -> str:
    return rate.removesuffix(_RATE) + _SLOT


def _is(name: str, last: str) -> bool:
    """Whether it is that, of the only optimizer or of an objective's."""
    return name.rpartition("/")[2] == last
