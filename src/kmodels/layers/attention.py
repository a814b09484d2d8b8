"""Multi-head attention."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.types import Tensor
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.layers.dense import Dense, WithKernel
from kmodels.layers.norm import LayerNorm, check_epsilon
from kmodels.ops.dropout import check_rate
from kmodels.ops.rotary_embedding import PAIRS


@keras.saving.register_keras_serializable(package="kmodels")
class Attention(WithKernel):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        num_heads: number of heads; the width must be a multiple of it.
        dropout: rate on the attention weights, in training.
        use_bias: biases of the four projections.
        qk_norm: normalises queries and keys per head (Dehghani et al. 2023).
        epsilon: epsilon of those norms.
        seed: seed of the dropout; None for the layer's own stream.
        causal: no query sees later keys; the last query sees the whole context.
        rope_wavelength: base of a rotary embedding of queries and keys, such as 10,000; None for
            none.
        rope_scaling: divides the positions of the rotary embedding; one number, or one for each
            pair of channels.
        unbiased: those of "query", "key", "value" and "output" without a bias despite use_bias.
        rope_pairs: for positions in a plane, as in `ops.rotary_embedding_2d`; None for positions in
            a row.
        **kwargs: initializers, regularizers and constraints of the projections, as in
            `keras.layers.MultiHeadAttention`, and what every Keras layer takes.

    Call:
        query (B, T, D), context (B, S, D) or None for self-attention -> (B, T, D). `attention_mask`
        is (B, T, S), (B, 1, S) or by head (B, N, T, S). The masks of padding that Keras passes are
        (B, T) for the query and (B, S) for the context.
        A `mask` of three or four axes counts as an attention mask. In self-attention, `segment_ids`
        (B, T) keep each token to its own segment. With `rope_wavelength`,
        `positions` (T,) or (B, T) and `context_positions` (S,) or (B, S) are 0, 1, ... by default.
        With `rope_pairs` they are coordinates (T, 2) or (B, T, 2), which have no default and are
        not rounded to the compute dtype.

    Weights:
        query, key, value, output: kernel (D, D) and bias (D,).

    Raises:
        InputError: for numbers out of range, heads that do not divide the width, heads of an odd
            width with a rotary embedding, positions without one, or one in a plane without places.
    """

    def __init__(
        self,
        num_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        qk_norm: bool = False,
        epsilon: float = 1e-6,
        seed: int | None = None,
        causal: bool = False,
        rope_wavelength: float | None = None,
        rope_scaling: float | Sequence[float] = 1.0,
        unbiased: Sequence[str] = (),
        rope_pairs: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_whole("num_heads", num_heads)
        check_rate(dropout)
        check_epsilon(epsilon)
        if rope_wavelength is not None:
            check_number("rope_wavelength", rope_wavelength, above=0)
        for divisor in rope_scaling if isinstance(rope_scaling, Sequence) else (rope_scaling,):
            check_number("rope_scaling", divisor, above=0)
        if rope_pairs not in (None, *PAIRS):
            raise InputError(f"rope_pairs is {rope_pairs!r}; give {', '.join(PAIRS)} or None")
        self.num_heads = num_heads
        self.dropout = dropout
        self.use_bias = use_bias
        self.qk_norm = qk_norm
        self.epsilon = epsilon
        self.seed = seed
        self.causal = causal
        self.rope_wavelength = rope_wavelength
        self.rope_scaling = rope_scaling
        self.unbiased = tuple(unbiased)
        self.rope_pairs = rope_pairs
        if rope_pairs is not None:
            self.keep_keywords()
        self.seed_generator = None

    def build(self, query_shape: Shape, context_shape: Shape | None = None) -> None:
        """Makes the projections for the width of `query`."""
        width = query_shape[-1]
        if width % self.num_heads:
            raise InputError(
                f"{self.num_heads} heads do not divide the width of {width}; give num_heads that do"
            )
        if self.rope_wavelength is not None and width // self.num_heads % 2:
            raise InputError(
                f"{self.num_heads} heads of a width of {width} have {width // self.num_heads} "
                "channels; a rotary embedding needs an even number"
            )
        self.seed_generator = self.add_seed(self.dropout, self.seed)
        for name in ("query", "key", "value", "output"):
            granularity = (self.num_heads, None) if name == "output" else (None, self.num_heads)
            layer = Dense(
                width,
                use_bias=self.use_bias and name not in self.unbiased,
                shard_granularity=granularity,
                name=name,
                dtype=self.dtype_policy,
                **self.kernel_settings,
            )
            setattr(self, f"{name}_dense", layer)
            layer.build((None, width))
        if self.qk_norm:
            for name in ("query_norm", "key_norm"):
                norm = LayerNorm(self.epsilon, name=name, dtype=self.dtype_policy)
                setattr(self, name, norm)
                norm.build((None, width // self.num_heads))

    def heads(
        self,
        query: Tensor,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> tuple[Any, Any, Any]:
        """Returns projected (query, key, value), each (B, length, N, H), with rotary embedding.

        Raises:
            InputError: for positions without a rotary embedding.
        """
        if context is None:
            context_positions = positions
        context = query if context is None else context
        q, k, v = self.query_dense(query), self.key_dense(context), self.value_dense(context)
        q, k, v = self._split(q), self._split(k), self._split(v)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope_wavelength is None and positions is None and context_positions is None:
            return q, k, v
        return self._turned(q, positions), self._turned(k, context_positions), v

    def _turned(self, x: Tensor, positions: Any) -> Any:
        if self.rope_wavelength is None:
            if positions is not None:
                raise InputError(
                    f"{self.name} got positions and has no rotary embedding; give rope_wavelength, "
                    "or leave them out"
                )
            return x
        if self.rope_pairs is not None:
            if positions is None:
                raise InputError(
                    f"{self.name} has a rotary embedding in a plane and got no positions; give "
                    "(T, 2) or (B, T, 2)"
                )
            return ops.rotary_embedding_2d(
                x, positions, max_wavelength=self.rope_wavelength, pairs=self.rope_pairs
            )
        return ops.rotary_embedding(
            x, positions, max_wavelength=self.rope_wavelength, scaling=self.rope_scaling
        )

    def _split(self, x: Tensor) -> Any:
        batch, length, width = shape_of(x)
        shape = (batch, length, self.num_heads, width // self.num_heads)
        return reshape(x, shape)  # (B, T, N, H)

    def call(
        self,
        query: Tensor,
        context: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        mask: Tensor | None = None,
        training: bool = False,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Any:
        """(B, T, D), (B, S, D) -> (B, T, D)."""
        q, k, v = self.heads(query, context, positions, context_positions)
        whole = None
        if mask is not None and len(mask.shape) > 2:
            whole, mask = mask, None
        # Keras passes `mask` if the query is the only tensor.
        own = mask if query_mask is None else query_mask
        padding = own if context is None else context_mask
        active = training and self.seed_generator is not None
        y = ops.attention(
            q,
            k,
            v,
            mask=_visible(attention_mask, whole, padding),
            causal=self.causal,
            segment_ids=segment_ids,
            dropout=self.dropout if active else 0.0,
            seed=self.seed_generator if active else None,
        )
        return self.output_dense(reshape(y, shape_of(query)))

    def probabilities(
        self, query: Tensor, context: Tensor | None = None, positions: Tensor | None = None
    ) -> Any:
        """Returns the attention weights (B, N, T, S) in float32, for inspection."""
        q, k, _ = self.heads(query, context, positions)
        q, k = keras.ops.cast(q, "float32"), keras.ops.cast(k, "float32")
        scores = keras.ops.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        if self.causal:
            length, keys = q.shape[1], k.shape[1]
            seen = np.arange(keys) <= np.arange(length)[:, None] + keys - length
            scores = keras.ops.where(seen, scores, float("-inf"))
        return keras.ops.softmax(scores, axis=-1)

    def compute_output_shape(self, query_shape: Shape, context_shape: Shape | None = None) -> Shape:
        """Returns the query's shape."""
        return query_shape


def _visible(attention_mask: Tensor | None, mask: Tensor | None, padding: Tensor | None) -> Any:
    """Returns the joint mask, broadcastable to (B, N, T, S); None if nothing is hidden."""
    allowed = None
    for part in (attention_mask, mask, padding):
        if part is None:
            continue
        part = keras.ops.cast(part, "bool")
        if len(part.shape) == 2:  # (B, S)
            part = keras.ops.expand_dims(part, (1, 2))  # which LiteRT has, and no slice of it
        elif len(part.shape) == 3:  # (B, T, S)
            part = keras.ops.expand_dims(part, 1)
        allowed = part if allowed is None else keras.ops.logical_and(allowed, part)
    return allowed
