"""The configuration of a Gemma, validated in one place."""

from dataclasses import dataclass

from kmodels.core.errors import InputError, check_whole
from kmodels.models.common.config import BlockConfig, DecoderConfig


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """Sizes and variants of a Gemma 1, 2 or 3 (text) backbone; names as in keras-hub.

    Args:
        vocabulary_size: rows of the embedding table.
        num_layers: blocks.
        num_query_heads: heads of the queries.
        num_key_value_heads: heads of keys and values; divides `num_query_heads`.
        hidden_dim: width of the hidden states.
        intermediate_dim: `gate_dim_reduction` times the width between the dense layers of the MLP.
        head_dim: width of each head; even.
        layer_norm_epsilon: epsilon of every norm.
        dropout: on attention weights and both residual branches, in training.
        query_head_dim_normalize: queries are divided by sqrt(head_dim); False for
            sqrt(hidden_dim / num_query_heads).
        query_pre_attention_scalar: what queries are divided by the root of, where it is neither.
        use_query_key_norm: normalises queries and keys per head (Gemma 3).
        use_post_ffw_norm: a norm after the MLP (Gemma 2 and 3).
        use_post_attention_norm: a norm after the attention (Gemma 2 and 3).
        attention_logit_soft_cap: soft cap of the attention scores (Gemma 2), or None.
        final_logit_soft_cap: soft cap of the logits (Gemma 2), or None.
        use_sliding_window_attention: local layers see a window only (Gemma 2 and 3).
        sliding_window_size: keys that a query of a local layer sees, its own included.
        sliding_window_pattern: a period of layers; the last is global, the others are local.
        local_rope_wavelength: base of the rotary embedding in local layers.
        global_rope_wavelength: the same in global layers, 1,000,000 in Gemma 3.
        local_rope_scaling_factor: divides the positions in local layers.
        global_rope_scaling_factor: the same in global layers, 8 in Gemma 3 from 4B on.
        gate_dim_reduction: 2 where `intermediate_dim` counts gate and up together, as keras-hub
            does for Gemma 1 and 2; 1 for Gemma 3.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window_size", "sliding_window_pattern", "gate_dim_reduction"):
            check_whole(name, getattr(self, name))
        if self.intermediate_dim % self.gate_dim_reduction:
            raise InputError(
                f"intermediate_dim is {self.intermediate_dim}; it counts {self.gate_dim_reduction} "
                "layers of equal width and must be a multiple of that"
            )
        for name in ("attention_logit_soft_cap", "final_logit_soft_cap"):
            cap = getattr(self, name)
            if cap is not None and cap <= 0:
                raise InputError(f"{name} is {cap}; give a positive number, or None for no cap")

    @property
    def mlp_dim(self) -> int:
        """Width of the gate, and of what it multiplies."""
        return self.intermediate_dim // self.gate_dim_reduction

    @property
    def query_scale(self) -> float:
        """The factor of the attention scores."""
        if self.query_pre_attention_scalar is not None:
            return self.query_pre_attention_scalar**-0.5
        if self.query_head_dim_normalize:
            return self.head_dim**-0.5
        return max(self.hidden_dim // self.num_query_heads, 1) ** -0.5

    @property
    def generation(self) -> int:
        """The generation of Gemma: 3 with query and key norms, 2 with post-norms, else 1."""
        if self.use_query_key_norm:
            return 3
        return 2 if self.use_post_attention_norm or self.use_post_ffw_norm else 1

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, sees a window only."""
        return self.use_sliding_window_attention and bool((layer + 1) % self.sliding_window_pattern)

    @property
    def scales_embeddings(self) -> bool:
        """True: embeddings are multiplied by sqrt(hidden_dim)."""
        return True

    @property
    def norm_offset(self) -> float:
        """Returns 1: norms multiply by 1 + scale."""
        return 1.0

    @property
    def logit_soft_cap(self) -> float | None:
        """The soft cap of the logits, or None."""
        return self.final_logit_soft_cap

    def block(self, index: int) -> BlockConfig:
        """Returns what the block with this number, from 0, is made of."""
        local = self.is_local(index)
        return BlockConfig(
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            epsilon=self.layer_norm_epsilon,
            query_scale=self.query_scale,
            rope_wavelength=self.local_rope_wavelength if local else self.global_rope_wavelength,
            rope_scaling=(
                self.local_rope_scaling_factor if local else self.global_rope_scaling_factor
            ),
            window=self.sliding_window_size if local else None,
            soft_cap=self.attention_logit_soft_cap,
            use_query_key_norm=self.use_query_key_norm,
            norm_offset=self.norm_offset,
            use_post_attention_norm=self.use_post_attention_norm,
            use_post_mlp_norm=self.use_post_ffw_norm,
            activation="gelu",
            dropout=self.dropout,
        )
