"""The sizes of decoders and encoders that decide the memory of a step."""

from dataclasses import dataclass
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks.config import DecoderConfig
from kmodels.models.blocks.encoder_config import EncoderConfig


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of one block of a transformer.

    Args:
        heads: heads of the queries.
        groups: heads of keys and values; 0 for a block that uses those of another block.
        head_dim: width of a head.
        mlp_dim: width between the dense layers of the MLP.
        post_norms: norms after attention and MLP as well.
        head_norms: norms on queries and keys.
        window: number of keys that a query attends to, None for all.
        soft_cap: soft cap of the attention scores, or None.
        dropout: rate within the block.
        attention_dropout: rate on the attention weights.
        per_layer: width of the block's per-layer embeddings; 0 for none.
        experts: number of experts besides the MLP; 0 for none.
        experts_per_token: experts that each token goes to.
        expert_dim: `mlp_dim` of each expert.
    """

    heads: int
    groups: int
    head_dim: int
    mlp_dim: int
    post_norms: bool = False
    head_norms: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    per_layer: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the memory of a transformer's step.

    Args:
        blocks: sizes of each block.
        width: width of the hidden states.
        tokens: tokens of an image; None for text, whose length the user chooses.
        vocabulary: rows of the embedding table; None for a model without one.
        gated: the MLP is gated (Gemma).
        causal: attention is causal.
    """

    blocks: tuple[BlockSizes, ...]
    width: int
    tokens: int | None = None
    vocabulary: int | None = None
    gated: bool = False
    causal: bool = False

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def idle_parameters(self) -> int:
        """Number of parameters in the experts that a token is not routed to."""
        idle = sum((b.experts - b.experts_per_token) * b.expert_dim for b in self.blocks)
        return 3 * self.width * idle


def sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of a decoder and of each of its blocks."""
    blocks = [
        BlockSizes(
            heads=block.num_query_heads,
            groups=0 if block.key_value_source is not None else block.num_key_value_heads,
            head_dim=block.head_dim,
            mlp_dim=block.mlp_dim,
            post_norms=block.use_post_attention_norm or block.use_post_mlp_norm,
            head_norms=block.use_query_key_norm,
            window=block.window,
            soft_cap=block.soft_cap,
            dropout=block.dropout,
            attention_dropout=block.dropout,
            per_layer=block.per_layer_dim,
            experts=block.num_experts,
            experts_per_token=block.num_experts_per_token,
            expert_dim=block.expert_dim,
        )
        for block in map(config.block, range(config.num_layers))
    ]
    return Sizes(
        blocks=tuple(blocks),
        width=config.hidden_dim,
        vocabulary=config.vocabulary_size,
        gated=True,
        causal=config.is_causal,
    )


def encoder(config: EncoderConfig, **more: Any) -> Sizes:
    """Returns the sizes of a model of `EncoderBlock`s; `more` has other arguments of `Sizes`."""
    settings = config.encoder_block
    block = BlockSizes(
        heads=settings.num_heads,
        groups=settings.num_heads,
        head_dim=config.hidden_dim // settings.num_heads,
        mlp_dim=settings.mlp_dim,
        head_norms=settings.use_query_key_norm,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
    )
    return Sizes(
        blocks=(block,) * config.num_layers,
        width=config.hidden_dim,
        gated=settings.gated,
        causal=settings.causal,
        **more,
    )


def without_images(config: Any) -> Sizes:
    """Raises `InputError`: the images of a step are not counted."""
    raise InputError(
        "the memory of images is not planned; plan the text of the model by its own name, such as "
        "gemma3_4b_text, and leave room for the tower; recipes take --ignore-memory-check"
    )
