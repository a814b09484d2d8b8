"""The perceptrons of a transformer block."""

from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import check_whole
from kmodels.core.types import ActivationLike, Tensor
from kmodels.layers.base import Shape
from kmodels.layers.dense import Dense, WithKernel
from kmodels.layers.dropout import Dropout


class _Hidden(WithKernel):
    """Linear layers with a hidden width; the output has the input's shape."""

    def __init__(self, hidden_dim: int, **kwargs: Any):
        super().__init__(**kwargs)
        check_whole("hidden_dim", hidden_dim)
        self.hidden_dim = hidden_dim

    def _dense(self, name: str, inner: int, outer: int, use_bias: bool) -> Dense:
        layer = Dense(
            outer, use_bias=use_bias, name=name, dtype=self.dtype_policy, **self.kernel_settings
        )
        layer.build((None, inner))
        return layer

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the input's shape."""
        return input_shape


class _WithDropout(_Hidden):
    """The same with biases, and dropout of the hidden activations."""

    def __init__(
        self,
        hidden_dim: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(hidden_dim, **kwargs)
        self.use_bias = use_bias
        self.seed = seed
        self.dropout = Dropout(dropout, seed=seed, name="dropout", dtype=self.dtype_policy)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again, as plain values."""
        return {**super().get_config(), "dropout": self.dropout.rate}


@keras.saving.register_keras_serializable(package="kmodels")
class MLP(_WithDropout):
    """Dense, GELU, dropout, dense (Dosovitskiy et al. 2021, section 3.1).

    Args:
        hidden_dim: width between the two dense layers.
        dropout: rate after the activation, in training.
        use_bias: biases of both layers.
        approximate: as in `ops.gelu`: False, True or "sigmoid".
        activation: a Keras activation in place of GELU; None for GELU.
        seed: seed of the dropout; None for the layer's own stream.
        **kwargs: initializers, regularizers and constraints, as in `Dense`, and what every Keras
            layer takes.

    Call:
        x (..., D) -> (..., D).

    Weights:
        up (D, hidden_dim), down (hidden_dim, D): kernel and bias.
    """

    def __init__(
        self,
        hidden_dim: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        approximate: bool | str = False,
        activation: ActivationLike = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(hidden_dim, dropout, use_bias, seed, **kwargs)
        self.approximate = approximate
        self.activation = None if activation is None else keras.activations.get(activation)

    def build(self, input_shape: Shape) -> None:
        """Makes the two dense layers."""
        width = input_shape[-1]
        self.up = self._dense("up", width, self.hidden_dim, self.use_bias)
        self.down = self._dense("down", self.hidden_dim, width, self.use_bias)
        self.dropout.build((None, self.hidden_dim))

    def call(self, x: Tensor, training: bool = False) -> Any:
        """(..., D) -> (..., D)."""
        up, down = self.up, self.down
        if self.activation is None and up.plain and down.plain:
            rate, seed = self.dropout.active(training)
            return ops.mlp(
                *(x, up.kernel, up.bias, down.kernel, down.bias),
                approximate=self.approximate,
                dropout=rate,
                seed=seed,
            )
        x = up(x)
        if self.activation is None:
            x = ops.gelu(x, approximate=self.approximate)
        else:
            x = self.activation(x)
        return down(self.dropout(x, training=training))


@keras.saving.register_keras_serializable(package="kmodels")
class GatedMLP(_Hidden):
    """Dense of GELU(gate) * up, no biases (Shazeer 2020).

    Args:
        hidden_dim: width of the gate and of the up projection.
        **kwargs: initializers, regularizers and constraints, as in `Dense`, and what every Keras
            layer takes.

    Call:
        x (..., D) -> (..., D).

    Weights:
        gate (D, hidden_dim), up (D, hidden_dim), down (hidden_dim, D): kernel.
    """

    def build(self, input_shape: Shape) -> None:
        """Makes the three dense layers."""
        width, hidden = input_shape[-1], self.hidden_dim
        self.gate = self._dense("gate", width, hidden, use_bias=False)
        self.up = self._dense("up", width, hidden, use_bias=False)
        self.down = self._dense("down", hidden, width, use_bias=False)

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., D)."""
        return self.down(ops.gated_gelu(self.gate(x), self.up(x)))


@keras.saving.register_keras_serializable(package="kmodels")
class SwiGLU(_WithDropout):
    """Dense of SiLU(gate) * up, with biases and dropout (Shazeer 2020; DINOv2's giant).

    Args:
        hidden_dim: width of the gate and of the up projection.
        dropout: rate after the product, in training.
        use_bias: biases of the three layers.
        seed: seed of the dropout; None for the layer's own stream.
        **kwargs: initializers, regularizers and constraints, as in `Dense`, and what every Keras
            layer takes.

    Call:
        x (..., D) -> (..., D).

    Weights:
        gate (D, hidden_dim), up (D, hidden_dim), down (hidden_dim, D): kernel and bias.
    """

    def build(self, input_shape: Shape) -> None:
        """Makes the three dense layers."""
        width, hidden = input_shape[-1], self.hidden_dim
        self.gate = self._dense("gate", width, hidden, self.use_bias)
        self.up = self._dense("up", width, hidden, self.use_bias)
        self.down = self._dense("down", hidden, width, self.use_bias)
        self.dropout.build((None, hidden))

    def call(self, x: Tensor, training: bool = False) -> Any:
        """(..., D) -> (..., D)."""
        x = ops.gated_silu(self.gate(x), self.up(x))
        return self.down(self.dropout(x, training=training))
