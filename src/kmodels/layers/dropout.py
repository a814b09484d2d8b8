"""Layers that are active in training only."""

from typing import Any

import keras

from kmodels import ops
from kmodels.layers.base import Layer, Shape


class _Random(Layer):
    """A layer with a rate and a random stream of its own."""

    def __init__(self, rate: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed_generator = None

    def build(self, _: Shape) -> None:
        """Makes the random stream."""
        self.seed_generator = self.add_seed(self.rate)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape


class Dropout(_Random):
    """Zeroes a share of the values and scales up the rest (Srivastava et al. 2014).

    Args:
        rate: share that is zeroed, in [0, 1).
    """

    def call(self, x: Any, training: bool = False) -> Any:
        """Same shape and dtype."""
        rate, seed = self.active(training)
        return x if seed is None else ops.dropout(x, rate, seed)

    def active(self, training: bool) -> tuple[float, keras.random.SeedGenerator | None]:
        """Rate and seed, for an op that drops by itself; (0, None) where nothing is dropped."""
        if not training or self.seed_generator is None:
            return 0.0, None
        return self.rate, self.seed_generator


class DropPath(_Random):
    """Drops a residual branch of whole examples (stochastic depth; Huang et al. 2016).

    Args:
        rate: share of the examples whose branch is dropped, in [0, 1).
    """

    def call(self, x: Any, training: bool = False) -> Any:
        """(B, ...) -> same shape; the examples that stay are divided by 1 - rate."""
        if not training or self.seed_generator is None:
            return x
        shape = (keras.ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        # The op's draw is one that torch.compile can trace; Keras' own breaks the graph.
        draw = ops.dropout(keras.ops.ones(shape, "float32"), self.rate, self.seed_generator)
        keep = keras.ops.cast(draw > 0, x.dtype)
        return x * keep / (1.0 - self.rate)
