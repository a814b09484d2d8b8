"""The choice of some of many experts for each token."""

from typing import Any

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers.base import Layer, Shape
from kmodels.layers.dense import Dense
from kmodels.layers.norm import RMSNorm
from kmodels.ops._wide import wide
from kmodels.ops.grouped_dense import rows_of


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
    """Chooses the experts of each token, and how much each counts.

    Args:
        num_experts: experts E.
        num_experts_per_token: experts K that each token goes to.
        epsilon: epsilon of the norm.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (..., D) -> indices (..., K) int32 and weights (..., K) float32: the K largest of
        projection(norm(x)) / sqrt(D), and their softmax times what each expert counts.

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
        """Makes the norm, the projection and what each expert counts."""
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
