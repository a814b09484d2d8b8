"""The base of every layer: weights that are keyed by their path."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels import initializers


class Layer(keras.layers.Layer):
    """A Keras layer whose first weights are the same on each backend."""

    def add_parameter(
        self, name: str, shape: Sequence[int], draw: initializers.Draw, trainable: bool = True
    ) -> Any:
        """Adds the variable `<layer path>/<name>`, drawn by `draw` from its own stream."""
        keyed = initializers.Keyed(draw, f"{self.path}/{name}")
        return self.add_weight(
            shape=tuple(shape), initializer=keyed, name=name, trainable=trainable
        )
