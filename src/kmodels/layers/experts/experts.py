"""A mixture of experts: a router chooses some of many perceptrons for each token."""

from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers.base import Layer, Shape, reshape, shape_of
from kmodels.layers.experts.grouped_dense import GroupedDense
from kmodels.layers.experts.router import Router, check_experts
from kmodels.ops.grouped_dense import rows_of

ACTIVATIONS = {"gelu": ops.gated_gelu, "silu": ops.gated_silu}


@keras.saving.register_keras_serializable(package="kmodels")
class Experts(Layer):
    """The sum of the gated perceptrons that a router chooses for each token.

    Args:
        num_experts: experts E.
        num_experts_per_token: experts K that each token goes to.
        hidden_dim: width I of the gate of each, and of what it multiplies.
        activation: activation of the gate: "gelu" in its tanh form, or "silu".
        epsilon: epsilon of the router's norm.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (B, T, D), and what the router reads (B, T, D) -> (B, T, D). No token is left out, however
        many choose the same expert.

    Weights:
        router: see `Router`; gate_up: kernel (E, D, 2 * I); down: kernel (E, I, D).

    Raises:
        InputError: for sizes that do not fit together, or another activation.
    """

    def __init__(
        self,
        num_experts: int,
        num_experts_per_token: int,
        hidden_dim: int,
        activation: str = "silu",
        epsilon: float = 1e-6,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_experts(num_experts, num_experts_per_token, hidden_dim)
        if activation not in ACTIVATIONS:
            raise InputError(f"activation is {activation!r}; choose {' or '.join(ACTIVATIONS)}")
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.hidden_dim = hidden_dim
        self.activation = activation
        self.epsilon = epsilon
        policy = self.dtype_policy
        self.router = Router(
            num_experts, num_experts_per_token, epsilon, name="router", dtype=policy
        )
        self.gate_up = GroupedDense(num_experts, 2 * hidden_dim, name="gate_up", dtype=policy)

    def build(self, input_shape: Shape, *_: object) -> None:
        """Makes the router and the kernels of all experts."""
        width, policy = input_shape[-1], self.dtype_policy
        self.router.build(input_shape)
        self.gate_up.build((None, width))
        self.down = GroupedDense(self.num_experts, width, name="down", dtype=policy)
        self.down.build((None, self.hidden_dim))

    def call(self, x: Tensor, routed: Tensor) -> Any:
        """(B, T, D), (B, T, D) -> (B, T, D)."""
        shape, chosen = shape_of(x), self.num_experts_per_token
        indices, weights = self.router(routed)
        order, sizes = self._sorted(reshape(indices, (-1,)))
        tokens = reshape(x, (-1, shape[-1]))
        y = self.gate_up(rows_of(tokens, order // chosen), sizes)
        gate, up = y[:, : self.hidden_dim], y[:, self.hidden_dim :]
        y = self.down(ACTIVATIONS[self.activation](gate, up), sizes)
        # Back in the order of the tokens, K rows for each.
        y = reshape(rows_of(y, keras.ops.argsort(order)), (-1, chosen, shape[-1]))
        weights = reshape(weights, (-1, chosen, 1))
        y = keras.ops.sum(keras.ops.cast(y, weights.dtype) * weights, axis=1)
        return reshape(keras.ops.cast(y, x.dtype), shape)

    def _sorted(self, experts: Tensor) -> tuple[Any, Any]:
        """Returns the order in which rows lie by their expert, and the number of rows of each."""
        order = keras.ops.cast(keras.ops.argsort(experts), "int32")
        numbers = keras.ops.arange(self.num_experts, dtype="int32")
        found = keras.ops.take(experts, order)
        ends = keras.ops.cast(keras.ops.searchsorted(found, numbers, side="right"), "int32")
        return order, ends - keras.ops.concatenate([ends[:1] * 0, ends[:-1]])

    def compute_output_shape(self, input_shape: Shape, *_: object) -> Shape:
        """Returns the input's shape."""
        return input_shape
