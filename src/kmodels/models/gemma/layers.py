"""Gemma's attention and its block."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels import ops
from kmodels.layers import Dense, Dropout, GatedMLP, Layer, RMSNorm
from kmodels.layers.base import Shape, reshape
from kmodels.models.gemma.config import GemmaConfig


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaAttention(Layer):
    """Causal attention with grouped key/value heads and rotary positions.

    Args:
        config: of the backbone.
        index: of the block, from 0; decides between window and whole context.

    Call:
        x (B, T, D) -> (B, T, D); the other arguments as in `GemmaBlock`, and a Keras mask too.

    Weights:
        query (D, N * H), key and value (D, K * H), output (N * H, D): kernel. Gemma 3 has
        query_norm and key_norm: scale (H,).
    """

    def __init__(self, config: GemmaConfig | Mapping[str, Any], index: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.config = config = GemmaConfig.of(config)
        self.index = index
        self.window = config.sliding_window_size if config.is_local(index) else None
        self.rope = {
            "max_wavelength": config.local_rope_wavelength,
            "scaling": config.local_rope_scaling_factor,
        }
        if self.window is None:
            self.rope = {
                "max_wavelength": config.global_rope_wavelength,
                "scaling": config.global_rope_scaling_factor,
            }
        self.query_norm = self.key_norm = self.seed_generator = None

    def build(self, input_shape: Shape) -> None:
        """Makes the projections, the norms and the random stream."""
        self.seed_generator = self.add_seed(self.config.dropout)
        config, width = self.config, input_shape[-1]
        heads, groups = config.num_query_heads, config.num_key_value_heads
        queries = heads * config.head_dim
        for name, inner, outer, granularity in (
            ("query", width, queries, (None, heads)),
            ("key", width, groups * config.head_dim, (None, groups)),
            ("value", width, groups * config.head_dim, (None, groups)),
            ("output", queries, width, (heads, None)),
        ):
            layer = Dense(
                outer,
                use_bias=False,
                shard_granularity=granularity,
                name=name,
                dtype=self.dtype_policy,
            )
            setattr(self, f"{name}_dense", layer)
            layer.build((None, inner))
        if config.use_query_key_norm:
            for name in ("query_norm", "key_norm"):
                norm = RMSNorm(config.layer_norm_epsilon, name=name, dtype=self.dtype_policy)
                setattr(self, name, norm)
                norm.build((None, config.head_dim))

    def call(
        self,
        x: Any,
        segment_ids: Any = None,
        positions: Any = None,
        cache: Any = None,
        training: bool = False,
        mask: Any = None,
        x_mask: Any = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D)."""
        length = keras.ops.shape(x)[1]
        if positions is None:
            positions = keras.ops.arange(length, dtype="int32")
        q = self._heads(self.query_dense(x), self.config.num_query_heads, length)
        k = self._heads(self.key_dense(x), self.config.num_key_value_heads, length)
        v = self._heads(self.value_dense(x), self.config.num_key_value_heads, length)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q = ops.rotary_embedding(q, positions, **self.rope)
        k = ops.rotary_embedding(k, positions, **self.rope)
        if cache is not None:
            k, v, visible = cache.extend(k, v, self.window)
        else:
            visible = {"causal": True, "window": self._window(length)}
            visible["mask"] = _visible(segment_ids, mask if x_mask is None else x_mask)
        active = training and self.seed_generator is not None
        y = ops.attention(
            q,
            k,
            v,
            **visible,
            scale=self.config.query_scale,
            soft_cap=self.config.attention_logit_soft_cap,
            dropout=self.config.dropout if active else 0.0,
            seed=self.seed_generator if active else None,
        )
        width = self.config.num_query_heads * self.config.head_dim
        return self.output_dense(reshape(y, (-1, length, width)))

    def _window(self, length: Any) -> int | None:
        """None where the window covers the whole row: a plain causal mask is the cheaper one."""
        if self.window is not None and isinstance(length, int) and length <= self.window:
            return None
        return self.window

    def _heads(self, x: Any, heads: int, length: Any) -> Any:
        return reshape(x, (-1, length, heads, self.config.head_dim))

    def compute_output_shape(self, input_shape: Shape, *_: Any) -> Shape:
        """The input's shape."""
        return input_shape


def _visible(segment_ids: Any, mask: Any) -> Any:
    """What tokens see beside what comes later, broadcastable to (B, 1, T, T); None for all."""
    allowed = None if mask is None else keras.ops.cast(mask, "bool")[:, None, None]
    if segment_ids is not None:
        same = keras.ops.equal(segment_ids[:, :, None], segment_ids[:, None, :])[:, None]
        allowed = same if allowed is None else keras.ops.logical_and(allowed, same)
    return allowed


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBlock(Layer):
    """One block: norms in front of attention and MLP, in Gemma 2 and 3 behind them too.

    Args:
        config: of the backbone.
        index: of the block, from 0.

    Call:
        x (B, T, D); segment_ids (B, T) int or None: tokens see those of their own segment only;
        positions (T,) or (B, T) int or None for 0, 1, ...; cache: keys and values of earlier
        tokens, with `extend(key, value, window) -> (key, value, arguments of ops.attention)`, or
        None -> (B, T, D). Tokens that a Keras mask leaves out are seen by none; they keep their
        positions. Keras hands the mask on, as `mask`, or beside other tensors as `x_mask`.
    """

    def __init__(self, config: GemmaConfig | Mapping[str, Any], index: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.config = config = GemmaConfig.of(config)
        self.index = index
        policy, epsilon = self.dtype_policy, config.layer_norm_epsilon
        self.attention_norm = RMSNorm(epsilon, name="attention_norm", dtype=policy)
        self.attention = GemmaAttention(config, index, name="attention", dtype=policy)
        self.mlp_norm = RMSNorm(epsilon, name="mlp_norm", dtype=policy)
        self.mlp = GatedMLP(config.mlp_dim, name="mlp", dtype=policy)
        self.post_attention_norm = self.post_mlp_norm = None
        if config.use_post_attention_norm:
            self.post_attention_norm = RMSNorm(epsilon, name="post_attention_norm", dtype=policy)
        if config.use_post_ffw_norm:
            self.post_mlp_norm = RMSNorm(epsilon, name="post_mlp_norm", dtype=policy)
        self.dropout = Dropout(config.dropout, name="dropout", dtype=policy)
        self.mlp_dropout = Dropout(config.dropout, name="mlp_dropout", dtype=policy)

    @property
    def use_sliding_window_attention(self) -> bool:
        """Whether tokens of this block see a window alone, by keras-hub's name."""
        return self.attention.window is not None

    def build(self, input_shape: Shape) -> None:
        """Builds every part for the width of the hidden states."""
        parts = (self.attention_norm, self.attention, self.post_attention_norm)
        parts = (*parts, self.dropout, self.mlp_norm, self.mlp, self.post_mlp_norm)
        for part in (*parts, self.mlp_dropout):
            if part is not None:
                part.build(input_shape)

    def call(
        self,
        x: Any,
        segment_ids: Any = None,
        positions: Any = None,
        cache: Any = None,
        training: bool = False,
        mask: Any = None,
        x_mask: Any = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D)."""
        y = self.attention(
            self.attention_norm(x),
            segment_ids=segment_ids,
            positions=positions,
            cache=cache,
            training=training,
            mask=mask if x_mask is None else x_mask,
        )
        if self.post_attention_norm is not None:
            y = self.post_attention_norm(y)
        x = x + self.dropout(y, training=training)
        y = self.mlp(self.mlp_norm(x))
        if self.post_mlp_norm is not None:
            y = self.post_mlp_norm(y)
        return x + self.mlp_dropout(y, training=training)

    def compute_output_shape(self, input_shape: Shape, *_: Any) -> Shape:
        """The input's shape."""
        return input_shape
