"""Layers that are active in training only."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers.base import Layer, Shape


class _Random(Layer):
    """A layer with a rate and a random stream."""

    def __init__(self, rate: float = 0.0, seed: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise InputError(f"{type(self).__name__} got the rate {rate!r}; give one in [0, 1)")
        self.supports_masking = True
        self.rate = rate
        self.seed = seed
        self.seed_generator = None

    def build(self, input_shape: Shape) -> None:
        """Makes the random stream."""
        self.seed_generator = self.add_seed(self.rate, self.seed)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape


@keras.saving.register_keras_serializable(package="kmodels")
class Dropout(_Random):
    """Zeroes a share of the values and scales up the rest (Srivastava et al. 2014).

    Args:
        rate: share that is zeroed, in [0, 1).
        noise_shape: shape of the dropout mask: 1 for an axis that shares it, None for the input's
            length; None for the input's shape.
        seed: seed of the stream; None for one from `keras.utils.set_random_seed` and the path.

    Call:
        x -> same shape and dtype.

    Raises:
        InputError: for a rate out of range, or a noise_shape of another rank than the input.
    """

    def __init__(
        self,
        rate: float = 0.0,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(rate, seed, **kwargs)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)

    def build(self, input_shape: Shape) -> None:
        """Makes the random stream."""
        if self.noise_shape is not None and len(self.noise_shape) != len(input_shape):
            raise InputError(
                f"noise_shape is {self.noise_shape} for an input of {len(input_shape)} axes; give "
                "a number or None for each"
            )
        super().build(input_shape)

    def call(self, x: Tensor, training: bool = False) -> Any:
        """Returns the same shape and dtype."""
        rate, seed = self.active(training)
        if seed is None:
            return x
        if self.noise_shape is None:
            return ops.dropout(x, rate, seed)
        shape = keras.ops.shape(x)
        drawn = [own if n is None else n for n, own in zip(self.noise_shape, shape, strict=True)]
        return x * ops.dropout(keras.ops.ones(drawn, x.dtype), rate, seed)

    def active(self, training: bool) -> tuple[float, keras.random.SeedGenerator | None]:
        """Returns rate and seed for an op that drops by itself; (0, None) if nothing is dropped."""
        if not training or self.seed_generator is None:
            return 0.0, None
        return self.rate, self.seed_generator


@keras.saving.register_keras_serializable(package="kmodels")
class DropPath(_Random):
    """Drops a residual branch of whole examples (stochastic depth; Huang et al. 2016).

    Args:
        rate: share of the examples whose branch is dropped, in [0, 1).
        seed: seed of the stream; None for one from `keras.utils.set_random_seed` and the path.

    Call:
        x (B, ...) -> same shape and dtype.

    Raises:
        InputError: for a rate out of range.
    """

    def call(self, x: Tensor, training: bool = False) -> Any:
        """(B, ...) -> same shape; the examples that stay are divided by 1 - rate."""
        if not training or self.seed_generator is None:
            return x
        shape = (keras.ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        # The op's draw is one that torch.compile can trace; Keras' own breaks the graph.
        draw = ops.dropout(keras.ops.ones(shape, "float32"), self.rate, self.seed_generator)
        keep = keras.ops.cast(draw > 0, x.dtype)
        return x * keep / (1.0 - self.rate)
