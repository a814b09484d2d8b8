"""The projection head of DINO."""

from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer
from kmodels.layers.base import Shape


@keras.saving.register_keras_serializable(package="kmodels")
class DINOHead(Layer):
    """An MLP to a narrow vector of length 1, and its cosines with learned directions.

    Args:
        units: number of directions K.
        hidden_dim: width of the two inner layers.
        bottleneck_dim: width of the narrow vector.

    Call:
        features (B, D) -> (B, K): each the product with a direction of length 1.

    Weights:
        dense_0, dense_1, bottleneck; directions (bottleneck_dim, K), which are divided by their
        lengths (a weight-normalised layer whose lengths are fixed at 1).

    Source:
        Caron et al. 2021 (arXiv:2104.14294), section 3.1 and appendix C.
    """

    def __init__(
        self, units: int, hidden_dim: int = 2048, bottleneck_dim: int = 256, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.supports_masking = False
        for name, value in (
            *(("units", units), ("hidden_dim", hidden_dim)),
            ("bottleneck_dim", bottleneck_dim),
        ):
            check_whole(name, value)
        self.units = units
        self.hidden_dim = hidden_dim
        self.bottleneck_dim = bottleneck_dim
        # The paper's deviation of 0.02 is this one for 2,048 inputs. A narrower head of 0.02 gives
        # vectors so short that their first gradients, divided by the length, are far too large.
        policy = self.dtype_policy
        normal = keras.initializers.VarianceScaling(1.0, "fan_in", "truncated_normal")
        widths = (("dense_0", hidden_dim), ("dense_1", hidden_dim), ("bottleneck", bottleneck_dim))
        self.parts = [
            Dense(width, kernel_initializer=normal, name=name, dtype=policy)
            for name, width in widths
        ]

    def build(self, input_shape: Shape) -> None:
        """Builds the MLP for the width of the features."""
        for part in self.parts:
            part.build(input_shape)
            input_shape = (*input_shape[:-1], part.units)
        normal = keras.initializers.RandomNormal(stddev=1.0)
        shape = (self.bottleneck_dim, self.units)
        self.directions = self.add_parameter("directions", shape, normal)

    def call(self, features: Tensor) -> Any:
        """(B, D) -> (B, K)."""
        x = features
        for part in self.parts[:-1]:
            x = ops.gelu(part(x), approximate=False)
        x = _unit(self.parts[-1](x), axis=-1)
        return ops.dense(x, keras.ops.cast(_unit(self.directions, axis=0), x.dtype))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, K)."""
        return (*input_shape[:-1], self.units)


def _unit(x: Tensor, axis: int) -> Any:
    """Returns vectors divided by their lengths, which are summed in float32 at least."""
    x = keras.ops.convert_to_tensor(x)
    kind = keras.backend.standardize_dtype(x.dtype)
    wide = x if kind in ("float32", "float64") else keras.ops.cast(x, "float32")
    squares = keras.ops.sum(keras.ops.square(wide), axis=axis, keepdims=True)
    return keras.ops.cast(wide * keras.ops.rsqrt(squares + 1e-12), kind)
