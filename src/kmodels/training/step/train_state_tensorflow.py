"""The state of a loop on TensorFlow: the variables themselves, moved by a graph."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kmodels.core.types import Tree
from kmodels.training.step.metrics import Results
from kmodels.training.step.objectives import LossFunction, Objectives
from kmodels.training.step.train_step_tensorflow import advance

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
    graphs: dict[Any, Callable[[Any], Results]] = {}

    def run(state: "TrainState", batch: Tree) -> Results:
        objectives: Objectives = state.objectives
        key = objectives, state.watch.state()
        if jit_compile is False:
            return advance(objectives, losses, batch)
        if key not in graphs:
            graphs[key] = tf.function(
                lambda batch: advance(objectives, losses, batch),
                autograph=False,
                reduce_retracing=True,
                jit_compile=jit_compile is True or None,
            )
        return graphs[key](batch)

    return run
