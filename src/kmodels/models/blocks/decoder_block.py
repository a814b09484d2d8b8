"""The attention and the transformer block of decoders, described by their configs."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import keras

from kmodels import ops
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Dropout, Embedding, Experts, GatedMLP, Layer, RMSNorm, SwiGLU
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.models.blocks.config import BlockConfig, DecoderConfig

if TYPE_CHECKING:
    from kmodels.generation.cache import LayerCache
    from kmodels.generation.task import DenseCache


class DecoderInfo(NamedTuple):
    """Properties of tokens (B, T, D) that the attention of a block depends on; None for none.

    Args:
        positions: (T,) or (B, T) int; None for 0, 1, ...
        segment_ids: (B, T) int; tokens attend within their own segment only.
        block_ids: (B, T) int; tokens with the same number attend to each other in both directions,
            as those of an image do; negative for none. With a cache they are of the prompt.
        key: (B, T, K, H), the keys of an earlier block that this one uses.
        value: (B, T, K, H), its values.
    """

    positions: Tensor | None = None
    segment_ids: Tensor | None = None
    block_ids: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None


NO_INFO = DecoderInfo()


class _OfBlock(Layer):
    """A part of the block with the number `index`; `block` has its settings."""

    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig

    def __init__(self, config: DecoderConfig | Mapping[str, Any], index: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.config = self.config_class.of(config)
        self.index = index
        self.block: BlockConfig = self.config.block(index)

    def norm(self, name: str) -> RMSNorm:
        """Returns a norm as this block has them."""
        block = self.block
        return RMSNorm(block.epsilon, offset=block.norm_offset, name=name, dtype=self.dtype_policy)

    def compute_output_shape(self, input_shape: Shape, *_: object) -> Any:
        """Returns the input's shape, and those of keys and values if it returns them."""
        if not self.block.shares_key_value:
            return input_shape
        heads = (*input_shape[:2], self.block.num_key_value_heads, self.block.head_dim)
        return input_shape, heads, heads


class DecoderAttention(_OfBlock):
    """Attention with grouped key/value heads and rotary positions; causal if the config is.

    Call:
        x (B, T, D), its `DecoderInfo` and a Keras `mask` (B, T) -> (B, T, D), with the keys and
        values that later blocks use as in `DecoderBlock`.

    Weights:
        query (D, N * H), key and value (D, K * H), output (N * H, D): kernel, and bias if the
        config says so. With norms of queries and keys query_norm and key_norm: scale (H,). A
        block that uses the keys and values of another has no key, value and key_norm; if keys
        are also the values there is no value.
    """

    def __init__(self, config: DecoderConfig | Mapping[str, Any], index: int, **kwargs: Any):
        super().__init__(config, index, **kwargs)
        self.window = self.block.window
        self.rope = {
            "max_wavelength": self.block.rope_wavelength,
            "scaling": self.block.rope_scaling,
            "turned": self.block.rope_turned,
        }
        self.key_dense = self.value_dense = None
        self.query_norm = self.key_norm = self.value_norm = self.seed_generator = None

    def build(self, input_shape: Shape) -> None:
        """Makes the projections, the norms and the random stream."""
        block, width = self.block, input_shape[-1]
        self.seed_generator = self.add_seed(block.dropout)
        heads, groups = block.num_query_heads, block.num_key_value_heads
        queries, here = heads * block.head_dim, (*block.projections, "output")
        for name, inner, outer, granularity in (
            ("query", width, queries, (None, heads)),
            ("key", width, groups * block.head_dim, (None, groups)),
            ("value", width, groups * block.head_dim, (None, groups)),
            ("output", queries, width, (heads, None)),
        ):
            if name not in here:
                continue
            layer = Dense(
                outer,
                use_bias=block.has_bias(f"attention/{name}"),
                shard_granularity=granularity,
                name=name,
                dtype=self.dtype_policy,
            )
            setattr(self, f"{name}_dense", layer)
            layer.build((None, inner))
        if block.use_query_key_norm:
            for name in ("query_norm", "key_norm") if "key" in here else ("query_norm",):
                norm = self.norm(name)
                setattr(self, name, norm)
                norm.build((None, block.head_dim))
        if block.use_value_norm and "key" in here:
            settings = {"use_scale": False, "name": "value_norm", "dtype": self.dtype_policy}
            self.value_norm = RMSNorm(block.epsilon, **settings)
            self.value_norm.build((None, block.head_dim))

    def call(
        self,
        x: Tensor,
        info: DecoderInfo = NO_INFO,
        training: bool = False,
        mask: Tensor | None = None,
        cache: "LayerCache | DenseCache | None" = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D)."""
        block, length = self.block, shape_of(x)[1]
        positions, segment_ids, block_ids, key, value = info
        q = self._heads(self.query_dense(x), block.num_query_heads, length)
        if self.query_norm is not None:
            q = self.query_norm(q)
        q = ops.rotary_embedding(q, positions, **self.rope)
        k: Any = key
        v: Any = value
        own = self.key_dense is not None
        if self.key_dense is not None:
            v = k = self._heads(self.key_dense(x), block.num_key_value_heads, length)
            if self.value_dense is not None:
                v = self._heads(self.value_dense(x), block.num_key_value_heads, length)
            if self.value_norm is not None:
                v = self.value_norm(v)
            if self.key_norm is not None:
                k = self.key_norm(k)
            k = ops.rotary_embedding(k, positions, **self.rope)
        if cache is not None:
            k, v, visible = cache.extend(k, v, self.window) if own else cache.extended
        else:
            if mask is not None:  # (B, S): the keys that are there, for all queries alike
                mask = keras.ops.expand_dims(keras.ops.cast(mask, "bool"), (1, 2))
            window = self.window
            if window is not None and isinstance(length, int) and length <= window:
                window = None  # it covers the whole row, which saves a mask
            visible = {"causal": block.causal, "window": window}
            visible |= {"mask": mask, "segment_ids": segment_ids}
        if block_ids is not None:
            visible = {**visible, "block_ids": block_ids}
        active = training and self.seed_generator is not None
        y = ops.attention(
            q,
            k,
            v,
            **visible,
            scale=block.query_scale,
            soft_cap=block.soft_cap,
            dropout=block.dropout if active else 0.0,
            seed=self.seed_generator if active else None,
        )
        width = block.num_query_heads * block.head_dim
        y = self.output_dense(reshape(y, (-1, length, width)))
        return (y, k, v) if block.shares_key_value and cache is None else y

    def _heads(self, x: Tensor, heads: int, length: int) -> Any:
        return reshape(x, (-1, length, heads, self.block.head_dim))


class _PerLayerInput(Layer):
    """The end of a block, which adds its part of the per-layer embeddings.

    Call:
        x (B, T, D), per_layer (B, T, P) -> (B, T, D): x and, through a norm,
        projection(GELU(input_gate(x)) * per_layer).

    Weights:
        input_gate (D, P), projection (P, D): kernel; norm: scale (D,).
    """

    def __init__(self, block: BlockConfig, **kwargs: Any):
        super().__init__(**kwargs)
        policy, settings = self.dtype_policy, {"offset": block.norm_offset, "name": "norm"}
        self.width = block.per_layer_dim
        self.input_gate = Dense(self.width, use_bias=False, name="input_gate", dtype=policy)
        self.norm = RMSNorm(block.epsilon, dtype=policy, **settings)

    def build(self, input_shape: Shape) -> None:
        """Makes the two layers and the norm for the width of x."""
        settings = {"use_bias": False, "name": "projection", "dtype": self.dtype_policy}
        self.projection = Dense(input_shape[-1], **settings)
        self.input_gate.build(input_shape)
        self.projection.build((*input_shape[:-1], self.width))
        self.norm.build(input_shape)

    def call(self, x: Tensor, per_layer: Tensor) -> Any:
        """(B, T, D), (B, T, P) -> (B, T, D)."""
        return x + self.norm(self.projection(ops.gated_gelu(self.input_gate(x), per_layer)))

    def compute_output_shape(self, input_shape: Shape, *_: object) -> Shape:
        """Returns the shape of x."""
        return input_shape


class DecoderBlock(_OfBlock):
    """One block: norms before attention and MLP, and after them if the config says so.

    A family's own class names its config, so that files can make the block again:

        @keras.saving.register_keras_serializable(package="kmodels")
        class Qwen3Block(DecoderBlock):
            config_class = Qwen3Config

    Call:
        x (B, T, D), its `DecoderInfo` and with per-layer embeddings `per_layer` (B, T, P)
        -> (B, T, D). A block whose keys and values a later block uses returns (x, key, value), both
        (B, T, K, H). Tokens that a Keras mask (B, T) leaves out are masked; they keep their
        positions. Keras passes it as `mask`, or along with other tensors as `x_mask`.

        `cache` has the keys and values of earlier tokens, with `extend(key, value, window) -> (key,
        value, arguments of ops.attention)` and the last result of that as `extended`. Blocks that
        share keys and values share the cache in place of `key` and `value`.

    Weights:
        those of the parts; with `use_layer_scalar` layer_scalar (1,), which is not trained. With
        experts mlp_result_norm, experts_norm and experts_result_norm: scale (D,).
    """

    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, config: DecoderConfig | Mapping[str, Any], index: int, **kwargs: Any):
        super().__init__(config, index, **kwargs)
        policy, block = self.dtype_policy, self.block
        self.attention_norm = self.norm("attention_norm")
        self.attention = self.attention_class(self.config, index, name="attention", dtype=policy)
        self.mlp_norm = self.norm("mlp_norm")
        if block.activation == "gelu":
            self.mlp = GatedMLP(block.mlp_dim, name="mlp", dtype=policy)
        else:
            self.mlp = SwiGLU(block.mlp_dim, use_bias=False, name="mlp", dtype=policy)
        self.post_attention_norm = self.post_mlp_norm = None
        if block.use_post_attention_norm:
            self.post_attention_norm = self.norm("post_attention_norm")
        if block.use_post_mlp_norm:
            self.post_mlp_norm = self.norm("post_mlp_norm")
        self.per_layer = self.layer_scalar = None
        if block.per_layer_dim:
            self.per_layer = _PerLayerInput(block, name="per_layer", dtype=policy)
        self.experts = None
        if block.num_experts:
            sizes = (block.num_experts, block.num_experts_per_token, block.expert_dim)
            more = {"activation": block.activation, "epsilon": block.epsilon}
            self.experts = Experts(*sizes, **more, name="experts", dtype=policy)
            self.mlp_result_norm = self.norm("mlp_result_norm")
            self.experts_norm = self.norm("experts_norm")
            self.experts_result_norm = self.norm("experts_result_norm")
        self.dropout = Dropout(block.dropout, name="dropout", dtype=policy)
        self.mlp_dropout = Dropout(block.dropout, name="mlp_dropout", dtype=policy)

    @property
    def use_sliding_window_attention(self) -> bool:
        """True if tokens of this block see only a window, by keras-hub's name."""
        return self.attention.window is not None

    def build(self, input_shape: Shape) -> None:
        """Builds every part for the width of the hidden states."""
        parts = (self.attention_norm, self.attention, self.post_attention_norm)
        parts = (*parts, self.dropout, self.mlp_norm, self.mlp, self.post_mlp_norm, self.per_layer)
        for part in (*parts, self.mlp_dropout):
            if part is not None:
                part.build(input_shape)
        if self.experts is not None:
            norms = (self.mlp_result_norm, self.experts_norm, self.experts_result_norm)
            for part in (self.experts, *norms):
                part.build(input_shape)
        if self.block.use_layer_scalar:
            self.layer_scalar = self.add_parameter("layer_scalar", (1,), "ones", trainable=False)

    def call(
        self,
        x: Tensor,
        info: DecoderInfo = NO_INFO,
        training: bool = False,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        per_layer: Tensor | None = None,
        cache: "LayerCache | DenseCache | None" = None,
    ) -> Any:
        """(B, T, D) -> (B, T, D)."""
        mask = mask if x_mask is None else x_mask
        y = self.attention(
            self.attention_norm(x), info=info, training=training, mask=mask, cache=cache
        )
        if gives := self.block.shares_key_value and cache is None:
            y, key, value = y
        if self.post_attention_norm is not None:
            y = self.post_attention_norm(y)
        x = x + self.dropout(y, training=training)
        y = self.mlp(self.mlp_norm(x))
        if self.experts is not None:
            more = self.experts_result_norm(self.experts(self.experts_norm(x), x))
            y = self.mlp_result_norm(y) + more
        if self.post_mlp_norm is not None:
            y = self.post_mlp_norm(y)
        x = x + self.mlp_dropout(y, training=training)
        if self.per_layer is not None:
            x = self.per_layer(x, per_layer)
        if self.layer_scalar is not None:
            x = x * self.layer_scalar
        return (x, key, value) if gives else x


class _Table(Embedding):
    """The table of `PerLayerEmbedding`, which is not the vocabulary that adapters train rows of."""

    is_vocabulary = False


@keras.saving.register_keras_serializable(package="kmodels")
class PerLayerEmbedding(Layer):
    """A second table of tokens, with a part for each block, and a projection of the first one's.

    Args:
        input_dim: rows V of the table.
        num_layers: blocks.
        output_dim: width P of the part of each block.
        epsilon: epsilon of the norm.
        offset: is added to the scale of the norm.

    Call:
        token_ids (B, T) int, x (B, T, D) embeddings of the model's table -> a list with (B, T, P)
        for each block: (row * sqrt(P) + norm(projection(x) / sqrt(D))) / sqrt(2). As in
        `Embedding`, sqrt(P) is rounded to the compute dtype.

    Weights:
        table: embeddings (V, layers * P); model_projection: kernel (D, layers * P); norm:
        scale (P,).
    """

    def __init__(
        self,
        input_dim: int,
        num_layers: int,
        output_dim: int,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.num_layers = num_layers
        self.output_dim = output_dim
        self.epsilon = epsilon
        self.offset = offset
        policy, width = self.dtype_policy, num_layers * output_dim
        spread = keras.initializers.RandomNormal(stddev=output_dim**-0.5)
        self.table = _Table(input_dim, width, spread, scaled=False, name="table", dtype=policy)
        self.model_projection = Dense(width, use_bias=False, name="model_projection", dtype=policy)
        self.norm = RMSNorm(epsilon, offset=offset, name="norm", dtype=policy)

    def build(self, token_ids_shape: Shape, x_shape: Shape) -> None:
        """Makes the table for token ids, and the projection for the width of x."""
        self.table.build()
        self.model_projection.build(x_shape)
        self.norm.build((*x_shape[:-1], self.output_dim))

    def call(self, token_ids: Tensor, x: Tensor) -> Any:
        """(B, T), (B, T, D) -> a list of (B, T, P)."""
        batch, length, width = shape_of(x)
        shape = (batch, length, self.num_layers, self.output_dim)
        own = self.table(token_ids)
        own = own * keras.ops.convert_to_tensor(math.sqrt(self.output_dim), own.dtype)
        seen = self.norm(reshape(self.model_projection(x) * width**-0.5, shape))
        both = (seen + reshape(own, shape)) * 2**-0.5
        return list(keras.ops.unstack(both, self.num_layers, axis=2))

    def compute_output_shape(self, token_ids_shape: Shape, x_shape: Shape) -> list[Shape]:
        """(B, T, P) for each block."""
        return [(*x_shape[:-1], self.output_dim)] * self.num_layers
