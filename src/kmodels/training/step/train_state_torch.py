"""The state of a loop on torch: the variables themselves."""

from collections.abc import Callable, Mapping
from typing import Any

from kmodels.training.step.metrics import Results
from kmodels.training.step.objectives import LossFunction
from kmodels.training.step.train_step_torch import advance


class State:
    """Nothing beside the variables."""

    def write_back(self) -> None:
        """Nothing to do: the values are in the variables."""


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """From a state, which is moved, and a batch to what the objectives returned."""
    del jit_compile  # Blocks and models are compiled by themselves.

    def run(state: Any, batch: Any) -> Results:
        state.watch.state()
        return advance(state.objectives, losses, batch)

    return run
