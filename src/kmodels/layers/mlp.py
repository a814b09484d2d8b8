"""The perceptrons of a transformer block."""

from typing import Any

import keras

from kmodels import ops
from kmodels.layers.base import Layer, Shape
from kmodels.layers.dense import Dense
from kmodels.layers.dropout import Dropout


class MLP(Layer):
    """Dense, GELU, dropout, dense (Dosovitskiy et al. 2021, section 3.1).

    Args:
        hidden_dim: width between the two dense layers.
        dropout: rate after the activation, in training.
        use_bias: biases of both layers.
        approximate: as in `ops.gelu`: False, True or "sigmoid".

    Weights:
        up (D, hidden_dim), down (hidden_dim, D): kernel and bias.
    """

    def __init__(
        self,
        hidden_dim: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        approximate: bool | str = False,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim
        self.use_bias = use_bias
        self.approximate = approximate
        self.dropout = Dropout(dropout, name="dropout", dtype=self.dtype_policy)

    def build(self, input_shape: Shape) -> None:
        """Makes the two dense layers."""
        width = input_shape[-1]
        self.up = Dense(self.hidden_dim, self.use_bias, name="up", dtype=self.dtype_policy)
        self.up.build((None, width))
        self.down = Dense(width, self.use_bias, name="down", dtype=self.dtype_policy)
        self.down.build((None, self.hidden_dim))
        self.dropout.build((None, self.hidden_dim))

    def call(self, x: Any, training: bool = False) -> Any:
        """(..., D) -> (..., D)."""
        if self.up.plain and self.down.plain:
            return self._together(x, training)
        x = ops.gelu(self.up(x), approximate=self.approximate)
        return self.down(self.dropout(x, training=training))

    def _together(self, x: Any, training: bool) -> Any:
        rate, seed = self.dropout.active(training)
        return ops.mlp(
            x,
            self.up.kernel,
            self.up.bias,
            self.down.kernel,
            self.down.bias,
            approximate=self.approximate,
            dropout=rate,
            seed=seed,
        )

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape


class GatedMLP(Layer):
    """Dense of GELU(gate) * up, no biases (Shazeer 2020).

    Args:
        hidden_dim: width of the gate and of what it multiplies.

    Weights:
        gate (D, hidden_dim), up (D, hidden_dim), down (hidden_dim, D): kernel.
    """

    def __init__(self, hidden_dim: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim

    def build(self, input_shape: Shape) -> None:
        """Makes the three dense layers."""
        width, hidden = input_shape[-1], self.hidden_dim
        self.gate = Dense(hidden, use_bias=False, name="gate", dtype=self.dtype_policy)
        self.gate.build((None, width))
        self.up = Dense(hidden, use_bias=False, name="up", dtype=self.dtype_policy)
        self.up.build((None, width))
        self.down = Dense(width, use_bias=False, name="down", dtype=self.dtype_policy)
        self.down.build((None, hidden))

    def call(self, x: Any) -> Any:
        """(..., D) -> (..., D)."""
        return self.down(ops.gated_gelu(self.gate(x), self.up(x)))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape


class SwiGLU(Layer):
    """Dense of SiLU(gate) * up, with biases and dropout (Shazeer 2020; DINOv2's giant).

    Args:
        hidden_dim: width of the gate and of what it multiplies.
        dropout: rate after the product, in training.
        use_bias: biases of the three layers.

    Weights:
        gate (D, hidden_dim), up (D, hidden_dim), down (hidden_dim, D): kernel and bias.
    """

    def __init__(self, hidden_dim: int, dropout: float = 0.0, use_bias: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim
        self.use_bias = use_bias
        self.dropout = Dropout(dropout, name="dropout", dtype=self.dtype_policy)

    def build(self, input_shape: Shape) -> None:
        """Makes the three dense layers."""
        width, hidden = input_shape[-1], self.hidden_dim
        for name, inner, outer in (
            ("gate", width, hidden),
            ("up", width, hidden),
            ("down", hidden, width),
        ):
            layer = Dense(outer, self.use_bias, name=name, dtype=self.dtype_policy)
            setattr(self, name, layer)
            layer.build((None, inner))
        self.dropout.build((None, hidden))

    def call(self, x: Any, training: bool = False) -> Any:
        """(..., D) -> (..., D)."""
        x = keras.ops.silu(self.gate(x)) * self.up(x)
        return self.down(self.dropout(x, training=training))

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """The input's shape."""
        return input_shape
