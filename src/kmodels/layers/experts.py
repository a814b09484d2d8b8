"""Mixtures of experts: a router chooses some of many perceptrons for each token."""

from typing import Any

import keras

from kmodels import ops
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers.base import Layer, Shape, reshape, shape_of
from kmodels.layers.dense import Dense, GroupedDense
from kmodels.layers.norm import RMSNorm
from kmodels.ops._wide import wide
from kmodels.ops.grouped_dense import rows_of

ACTIVATIONS = {"gelu": ops.gated_gelu, "silu": ops.gated_silu}


def check_experts(count: int, chosen: int, width: int) -> None:
    """Raises `InputError` for sizes of a mixture that do not fit together."""
    check_whole("num_experts", count)
    check_whole("num_experts_per_token", chosen)
    check_whole("expert_intermediate_dim", width)
    if chosen > count:
        raise InputError(
            f"num_experts_per_token is {chosen}, of {count} experts; give at most num_experts"
        )


@keras.saving.register_keras_serializable(package="kmodels")
class Router(Layer):
    """Chooses the experts of each token, and their weights.

    Args:
        num_experts: experts E.
        num_experts_per_token: experts K that each token goes to.
        epsilon: epsilon of the norm.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (..., D) -> indices (..., K) int32 and weights (..., K) float32: the K largest of
        projection(norm(x)) / sqrt(D), and their softmax times `expert_scale`.

    Weights:
        norm: scale (D,); projection: kernel (D, E); expert_scale (E,).
    """

    def __init__(
        self, num_experts: int, num_experts_per_token: int, epsilon: float = 1e-6, **kwargs: Any
    ):
        super().__init__(**kwargs)
        check_experts(num_experts, num_experts_per_token, 1)
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.epsilon = epsilon
        policy = self.dtype_policy
        self.norm = RMSNorm(epsilon, offset=0.0, name="norm", dtype=policy)
        self.projection = Dense(num_experts, use_bias=False, name="projection", dtype=policy)

    def build(self, input_shape: Shape) -> None:
        """Makes the norm, the projection and `expert_scale`."""
        self.norm.build(input_shape)
        self.projection.build(input_shape)
        self.expert_scale = self.add_parameter("expert_scale", (self.num_experts,), "ones")

    def call(self, x: Tensor) -> Any:
        """(..., D) -> (..., K), (..., K)."""
        logits = self.projection(self.norm(x))
        logits = keras.ops.cast(logits, wide(logits)) * x.shape[-1] ** -0.5
        # The softmax over all experts, of which the K largest are scaled to a sum of 1.
        largest, indices = keras.ops.top_k(logits, self.num_experts_per_token)
        indices = keras.ops.cast(indices, "int32")
        scale = keras.ops.cast(rows_of(self.expert_scale, indices), largest.dtype)
        return indices, keras.ops.softmax(largest) * scale

    def compute_output_shape(self, input_shape: Shape) -> tuple[Shape, Shape]:
        """(..., D) -> (..., K), (..., K)."""
        shape = (*input_shape[:-1], self.num_experts_per_token)
        return shape, shape


@keras.saving.register_keras_serializable(package="kmodels")
class Experts(Layer):
    """The sum of the gated perceptrons that a router chooses for each token.

    Args:
        num_experts: experts E.
        num_experts_per_token: experts K that each token goes to.
        hidden_dim: width I of each expert's gate and up projection.
        activation: activation of the gate: "gelu" in its tanh form, or "silu".
        epsilon: epsilon of the router's norm.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (B, T, D) and the router's input (B, T, D) -> (B, T, D). No token is dropped: experts have
        no capacity.

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
        # The order of rows sorted by expert, and the number of rows of each.
        experts, cast = reshape(indices, (-1,)), keras.ops.cast
        order = cast(keras.ops.argsort(experts), "int32")
        numbers = keras.ops.arange(self.num_experts, dtype="int32")
        ends = keras.ops.searchsorted(keras.ops.take(experts, order), numbers, side="right")
        ends = cast(ends, "int32")
        sizes = ends - keras.ops.concatenate([ends[:1] * 0, ends[:-1]])
        tokens = reshape(x, (-1, shape[-1]))
        y = self.gate_up(rows_of(tokens, order // chosen), sizes)
        gate, up = y[:, : self.hidden_dim], y[:, self.hidden_dim :]
        y = self.down(ACTIVATIONS[self.activation](gate, up), sizes)
        # Back in the order of the tokens, K rows for each.
        y = reshape(rows_of(y, keras.ops.argsort(order)), (-1, chosen, shape[-1]))
        weights = reshape(weights, (-1, chosen, 1))
        y = keras.ops.sum(keras.ops.cast(y, weights.dtype) * weights, axis=1)
        return reshape(keras.ops.cast(y, x.dtype), shape)

    def compute_output_shape(self, input_shape: Shape, *_: object) -> Shape:
        """Returns the input's shape."""
        return input_shape
