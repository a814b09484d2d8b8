"""The optimizers of several objectives as the one that Keras' trainer asks for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError


class Optimizers(keras.optimizers.Optimizer):
    """Several optimizers, each with its own variables; a step asks each of them by itself.

    Args:
        by_player: in the order of the turns.
        build: makes the slots of all.
    """

    def __init__(self, by_player: Mapping[str, Any], build: Callable[[], None]):
        super().__init__(learning_rate=0.0, name="optimizers")
        self.by_player = dict(by_player)
        self._build = build

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the slots; each optimizer knows its own variables."""
        self._build()
        self.built = True

    @property
    def variables(self) -> list[Any]:
        """Those of all."""
        return [v for optimizer in self.by_player.values() for v in optimizer.variables]

    @property
    def iterations(self) -> Any:
        """Updates of the first objective."""
        return next(iter(self.by_player.values())).iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the first objective."""
        return next(iter(self.by_player.values())).learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        raise InputError(
            f"{', '.join(self.by_player)} have optimizers of their own; set "
            "step.optimizer.by_player[name].learning_rate, or give each a schedule"
        )

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Puts moving averages into the models where an optimizer does so at the end of `fit`."""
        for optimizer in self.by_player.values():
            optimizer.finalize_variable_values(keras_internals.built_for(optimizer))

    def get_config(self) -> dict[str, Any]:
        """Returns the optimizers' own."""
        return {
            name: keras.optimizers.serialize(optimizer)
            for name, optimizer in self.by_player.items()
        }
