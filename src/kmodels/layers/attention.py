"""Multi-head attention."""

from typing import Any

import keras

from kmodels import ops
from kmodels.layers.base import Layer, Shape
from kmodels.layers.dense import Dense
from kmodels.layers.norm import LayerNorm


class Attention(Layer):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        num_heads: number of heads; the width must be a multiple of it.
        dropout: rate on the attention weights, in training.
        use_bias: biases of the four projections.
        qk_norm: normalises queries and keys per head (Dehghani et al. 2023).
        epsilon: of those norms.

    Call:
        query (B, T, D), context (B, S, D) or None for self-attention -> (B, T, D).

    Weights:
        query, key, value, output: kernel (D, D) and bias (D,).
    """

    def __init__(
        self,
        num_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        qk_norm: bool = False,
        epsilon: float = 1e-6,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.dropout = dropout
        self.use_bias = use_bias
        self.qk_norm = qk_norm
        self.epsilon = epsilon
        self.seed_generator = None

    def build(self, query_shape: Shape, *_: Any) -> None:
        """Makes the projections for the width of `query`."""
        width = query_shape[-1]
        self.seed_generator = self.add_seed(self.dropout)
        for name in ("query", "key", "value", "output"):
            parts = (self.num_heads, None) if name == "output" else (None, self.num_heads)
            layer = Dense(width, self.use_bias, parts=parts, name=name, dtype=self.dtype_policy)
            setattr(self, f"{name}_dense", layer)
            layer.build((None, width))
        if self.qk_norm:
            for name in ("query_norm", "key_norm"):
                norm = LayerNorm(self.epsilon, name=name, dtype=self.dtype_policy)
                setattr(self, name, norm)
                norm.build((None, width // self.num_heads))

    def heads(self, query: Any, context: Any = None) -> tuple[Any, Any, Any]:
        """Projected (query, key, value), each (B, length, N, H)."""
        context = query if context is None else context
        q, k, v = self.query_dense(query), self.key_dense(context), self.value_dense(context)
        q, k, v = (self._split(x) for x in (q, k, v))
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v

    def _split(self, x: Any) -> Any:
        return keras.ops.reshape(
            x, (-1, x.shape[1], self.num_heads, x.shape[2] // self.num_heads)
        )  # (B, T, N, H)

    def call(self, query: Any, context: Any = None, training: bool = False) -> Any:
        """(B, T, D), (B, S, D) -> (B, T, D)."""
        q, k, v = self.heads(query, context)
        active = training and self.seed_generator is not None
        y = ops.attention(
            q,
            k,
            v,
            dropout=self.dropout if active else 0.0,
            seed=self.seed_generator if active else None,
        )
        return self.output_dense(keras.ops.reshape(y, (-1, y.shape[1], query.shape[-1])))

    def probabilities(self, query: Any, context: Any = None) -> Any:
        """The attention weights themselves, (B, N, T, S) in float32, for looking at them."""
        q, k, _ = self.heads(query, context)
        q, k = keras.ops.cast(q, "float32"), keras.ops.cast(k, "float32")
        scores = keras.ops.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        return keras.ops.softmax(scores, axis=-1)

    def compute_output_shape(self, query_shape: Shape, *_: Any) -> Shape:
        """The query's shape."""
        return query_shape
