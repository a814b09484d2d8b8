"""The state of a loop on TensorFlow: the variables themselves, moved by a graph."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from kmodels.training.step.metrics import Results
from kmodels.training.step.players import LossFunction, Players
from kmodels.training.step.train_step_tensorflow import advance


class State:
    """Nothing beside the variables."""

    def write_back(self) -> None:
        """Nothing to do: the values are in the variables."""


def compiled(
    losses: Mapping[str, LossFunction], jit_compile: bool | str
) -> Callable[[Any, Any], Results]:
    """From a state, which is moved, and a batch to what the players returned."""
    graphs: dict[Any, Callable[[Any], Results]] = {}

    def run(state: Any, batch: Any) -> Results:
        players: Players = state.players
        key = players, state.watch.state()
        if jit_compile is False:
            return advance(players, losses, batch)
        if key not in graphs:
            graphs[key] = tf.function(
                lambda batch: advance(players, losses, batch),
                autograph=False,
                reduce_retracing=True,
                jit_compile=jit_compile is True or None,
            )
        return graphs[key](batch)

    return run
