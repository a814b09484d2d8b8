"""The state of a loop on torch: the variables themselves."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kmodels.core.types import Tree
from kmodels.training.step.metrics import Results
from kmodels.training.step.objectives import LossFunction
from kmodels.training.step.train_step_torch import advance

if TYPE_CHECKING:
    from kmodels.training.step.train_state import TrainState


class State:
    """Nothing beside the variables."""

    def write_back(self) -> None:
        """Does nothing: the values are in the variables."""


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """Takes a state, which is moved, and a batch, and returns what the objectives returned."""
    del jit_compile  # Blocks and models are compiled by themselves.

    def run(state: "TrainState", batch: Tree) -> Results:
        state.watch.state()
        return advance(state.objectives, losses, batch)

    return run
