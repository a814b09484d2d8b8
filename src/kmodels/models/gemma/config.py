"""The configuration of Gemma 1 to 4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from kmodels.core.errors import InputError, check_whole
from kmodels.layers.experts import check_experts
from kmodels.models.blocks.config import (
    GLOBAL,
    LOCAL,
    BlockConfig,
    DecoderConfig,
    check_kinds,
    check_positive,
    kv_sources,
)
from kmodels.models.blocks.rope import Yarn, check_alone

# Fields that only Gemma 4 uses.
FROM_4 = (
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
    *("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input"),
    *("vocab_size_per_layer_input", "global_rope_partial_rotary_factor"),
    *("use_value_norm", "use_layer_scalar", "norm_offset", "enable_moe_block"),
)


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """Sizes and variants of a Gemma 1, 2, 3 or 4 (text) backbone; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table.
        num_layers: number of blocks.
        num_query_heads: query heads.
        num_key_value_heads: key/value heads; divides `num_query_heads`.
        hidden_dim: width of the hidden states.
        intermediate_dim: `gate_dim_reduction` times the width between the dense layers of the MLP.
        head_dim: width of each head; even.
        layer_norm_epsilon: epsilon of every norm.
        dropout: rate on attention weights and both residual branches, in training.
        tie_word_embeddings: True to use the embedding table as output layer; False for an untied
            output layer.
        query_head_dim_normalize: queries are divided by sqrt(head_dim); False for
            sqrt(hidden_dim / num_query_heads).
        query_pre_attention_scalar: number whose square root divides the queries; None for the one
            that `query_head_dim_normalize` sets.
        use_query_key_norm: normalizes queries and keys per head (Gemma 3).
        use_post_ffw_norm: a norm after the MLP (Gemma 2 and 3).
        use_post_attention_norm: a norm after the attention (Gemma 2 and 3).
        attention_logit_soft_cap: soft cap of the attention scores (Gemma 2), or None.
        final_logit_soft_cap: soft cap of the logits (Gemma 2), or None.
        use_sliding_window_attention: local layers attend within a window (Gemma 2 and 3).
        sliding_window_size: number of keys that a query of a local layer attends to, its own
            included.
        sliding_window_pattern: period of layers; the last is global, the others are local.
        local_rope_wavelength: base of the rotary position embedding in local layers.
        global_rope_wavelength: the same in global layers, 1,000,000 in Gemma 3.
        local_rope_scaling_factor: divides the positions in local layers.
        global_rope_scaling_factor: the same in global layers, 8 in Gemma 3 from 4B on.
        gate_dim_reduction: 2 if `intermediate_dim` counts gate and up together, as in keras-hub's
            Gemma 1 and 2; 1 for Gemma 3 and 4.
        layer_types: for each layer "sliding_attention" (local) or "full_attention" (global); None
            to follow `sliding_window_pattern`. This and all following fields are for Gemma 4.
        global_head_dim: `head_dim` of global layers, if different.
        num_global_key_value_heads: `num_key_value_heads` of global layers, if different.
        attention_k_eq_v: values are the projected keys in global layers.
        num_kv_shared_layers: number of last layers that use the keys and values of the last earlier
            layer of their kind.
        use_double_wide_mlp: those layers have an MLP of twice the width.
        hidden_size_per_layer_input: width of the per-layer embeddings; 0 for none.
        vocab_size_per_layer_input: rows of their table; None for `vocabulary_size`.
        global_rope_partial_rotary_factor: share of the channels with rotary position embedding in
            global layers.
        use_value_norm: normalizes values per head, without a scale.
        use_layer_scalar: multiplies the output of each layer by a learned number.
        norm_offset: added to the scale of each norm, 1 up to Gemma 3 and 0 in Gemma 4.
        use_bidirectional_attention: attention is not causal (EmbeddingGemma); local layers attend
            to `sliding_window_size // 2` keys on either side, as in transformers.
        enable_moe_block: a mixture of experts in addition to the MLP of each layer.
        num_experts: experts of a layer.
        num_experts_per_token: experts that each token is routed to.
        expert_intermediate_dim: width between the dense layers of an expert.
        local_rope_yarn: arguments of `Yarn` in local layers, such as {"factor": 4.0,
            "original_max_position_embeddings": 8192}, for contexts longer than in training; the
            scaling factor of these layers must then be 1.
        global_rope_yarn: the same in global layers.

    Raises:
        InputError: for sizes that do not fit together.
    """

    vocabulary_size: int = 256_000
    num_layers: int = 18
    num_query_heads: int = 8
    num_key_value_heads: int = 1
    hidden_dim: int = 2048
    intermediate_dim: int = 32_768
    head_dim: int = 256
    layer_norm_epsilon: float = 1e-6
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    query_head_dim_normalize: bool = True
    query_pre_attention_scalar: float | None = None
    use_query_key_norm: bool = False
    use_post_ffw_norm: bool = False
    use_post_attention_norm: bool = False
    attention_logit_soft_cap: float | None = None
    final_logit_soft_cap: float | None = None
    use_sliding_window_attention: bool = False
    sliding_window_size: int = 4096
    sliding_window_pattern: int = 2
    local_rope_wavelength: float = 10_000.0
    global_rope_wavelength: float = 10_000.0
    local_rope_scaling_factor: float = 1.0
    global_rope_scaling_factor: float = 1.0
    gate_dim_reduction: int = 2
    layer_types: Sequence[str] | None = None
    global_head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int | None = None
    global_rope_partial_rotary_factor: float = 1.0
    use_value_norm: bool = False
    use_layer_scalar: bool = False
    norm_offset: float = 1.0
    use_bidirectional_attention: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    num_experts_per_token: int | None = 8
    expert_intermediate_dim: int | None = None
    local_rope_yarn: Mapping[str, Any] | None = None
    global_rope_yarn: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window_size", "sliding_window_pattern", "gate_dim_reduction"):
            check_whole(name, getattr(self, name))
        if self.intermediate_dim % self.gate_dim_reduction:
            raise InputError(
                f"intermediate_dim is {self.intermediate_dim}; it counts {self.gate_dim_reduction} "
                "layers of equal width and must be a multiple of that"
            )
        check_positive(self, "attention_logit_soft_cap", "final_logit_soft_cap", none="no cap")
        ropes = ("rope_wavelength", "rope_scaling_factor")
        check_positive(self, *(f"{where}_{x}" for where in ("local", "global") for x in ropes))
        check_positive(self, "query_pre_attention_scalar", none="the width of the heads")
        self._check_layers()
        factors = {
            "local": ("local_rope_scaling_factor",),
            "global": ("global_rope_scaling_factor", "global_rope_partial_rotary_factor"),
        }
        for where, names in factors.items():
            if self.yarn(where) is not None:
                check_alone(self, f"{where}_rope_yarn", *names)
        if self.enable_moe_block:
            check_experts(*self._experts)

    def _check_layers(self) -> None:
        check_whole("hidden_size_per_layer_input", self.hidden_size_per_layer_input, least=0)
        least = {"vocab_size_per_layer_input": self.vocabulary_size}  # each token has a row
        for name in ("global_head_dim", "num_global_key_value_heads", *least):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least=least.get(name, 1))
        if (self.global_head_dim or 2) % 2:
            raise InputError(
                f"global_head_dim is {self.global_head_dim}; rotary embedding needs an even number"
            )
        if self.num_query_heads % (groups := self.num_global_key_value_heads or 1):
            raise InputError(
                f"{groups} global key/value heads do not divide {self.num_query_heads} query "
                "heads; give a divisor"
            )
        if not 0.0 <= (share := self.global_rope_partial_rotary_factor) <= 1.0:
            raise InputError(
                f"global_rope_partial_rotary_factor is {share}; give a share in [0, 1]"
            )
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        check_kinds(self.kinds, self.num_layers, self.num_kv_shared_layers)

    def yarn(self, where: str) -> Yarn | None:
        """Returns the YaRN settings of the "local" or the "global" layers, or None."""
        settings = getattr(self, f"{where}_rope_yarn")
        return None if settings is None else Yarn.of(settings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        types = None if self.layer_types is None else list(self.layer_types)
        return {**super().to_dict(), "layer_types": types}

    def resized(self, vocabulary_size: int) -> Self:
        """Returns this config with tables of another number of rows."""
        return replace(self, vocabulary_size=vocabulary_size, vocab_size_per_layer_input=None)

    @property
    def _experts(self) -> tuple[Any, Any, Any]:
        return self.num_experts, self.num_experts_per_token, self.expert_intermediate_dim

    @property
    def per_layer_vocabulary(self) -> int:
        """Rows of the table of per-layer embeddings."""
        return self.vocab_size_per_layer_input or self.vocabulary_size

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer, in the words of `layer_types`."""
        if self.layer_types is not None:
            return tuple(self.layer_types)
        windows = self.use_sliding_window_attention
        return tuple(
            LOCAL if windows and (i + 1) % self.sliding_window_pattern else GLOBAL
            for i in range(self.num_layers)
        )

    @property
    def sources(self) -> list[int | None]:
        """Whose keys and values each layer uses, None for its own."""
        return kv_sources(self.kinds, self.num_kv_shared_layers)

    @property
    def mlp_dim(self) -> int:
        """Width of the gate, and of the layer that it multiplies."""
        return self.intermediate_dim // self.gate_dim_reduction

    @property
    def query_scale(self) -> float:
        """The factor of the attention scores, in layers with heads of `head_dim`."""
        return self._query_scale(self.head_dim)

    def _query_scale(self, head_dim: int) -> float:
        if self.query_pre_attention_scalar is not None:
            return self.query_pre_attention_scalar**-0.5
        if self.query_head_dim_normalize:
            return head_dim**-0.5
        return max(self.hidden_dim // self.num_query_heads, 1) ** -0.5

    @property
    def generation(self) -> int:
        """The generation of Gemma, by its norms: 4 without offset, 3 on queries, 2 at the end."""
        if not self.norm_offset:
            return 4
        if self.use_query_key_norm:
            return 3
        return 2 if self.use_post_attention_norm or self.use_post_ffw_norm else 1

    @property
    def published_length(self) -> int:
        """`max_sequence_length` of the published models."""
        return {1: 8192, 2: 8192, 3: 32_768, 4: 131_072}[self.generation]

    @property
    def of_gemma_4(self) -> list[str]:
        """Names of the fields in use that earlier generations lack."""
        return [name for name in FROM_4 if getattr(self, name) != getattr(type(self), name)]

    def is_local(self, layer: int) -> bool:
        """Returns True if a layer, counted from 0, attends within a window."""
        return self.use_sliding_window_attention and self.kinds[layer] == LOCAL

    @property
    def scales_embeddings(self) -> bool:
        """True: embeddings are multiplied by sqrt(hidden_dim)."""
        return True

    @property
    def is_causal(self) -> bool:
        """True if attention is causal."""
        return not self.use_bidirectional_attention

    @property
    def logit_soft_cap(self) -> float | None:
        """The soft cap of the logits, or None."""
        return self.final_logit_soft_cap

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of the block with this number, from 0."""
        local, sources = self.kinds[index] == LOCAL, self.sources
        heads, width = self.num_key_value_heads, self.head_dim
        if not local:
            heads = self.num_global_key_value_heads or heads
            width = self.global_head_dim or width
        window = self.sliding_window_size if self.is_causal else self.sliding_window_size // 2 + 1
        experts = self._experts if self.enable_moe_block else (0, 0, 0)
        where = "local" if local else "global"
        wavelength, yarn = getattr(self, f"{where}_rope_wavelength"), self.yarn(where)
        wide = self.use_double_wide_mlp and sources[index] is not None
        return BlockConfig(
            num_query_heads=self.num_query_heads,
            num_key_value_heads=heads,
            head_dim=width,
            mlp_dim=self.mlp_dim * (2 if wide else 1),
            epsilon=self.layer_norm_epsilon,
            query_scale=self._query_scale(width) * (yarn.query_scale if yarn else 1.0),
            rope_wavelength=wavelength,
            rope_scaling=(
                yarn.divisors(width, wavelength)
                if yarn
                else getattr(self, f"{where}_rope_scaling_factor")
            ),
            window=window if self.is_local(index) else None,
            soft_cap=self.attention_logit_soft_cap,
            use_query_key_norm=self.use_query_key_norm,
            norm_offset=self.norm_offset,
            use_post_attention_norm=self.use_post_attention_norm,
            use_post_mlp_norm=self.use_post_ffw_norm,
            activation="gelu",
            dropout=self.dropout,
            rope_turned=1.0 if local else self.global_rope_partial_rotary_factor,
            use_value_norm=self.use_value_norm,
            key_is_value=self.attention_k_eq_v and not local,
            key_value_source=sources[index],
            shares_key_value=index in sources,
            per_layer_dim=self.hidden_size_per_layer_input,
            use_layer_scalar=self.use_layer_scalar,
            causal=self.is_causal,
            num_experts=experts[0],
            num_experts_per_token=experts[1],
            expert_dim=experts[2],
        )
