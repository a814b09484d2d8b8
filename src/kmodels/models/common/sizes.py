"""The sizes of decoders and encoders that decide the memory of a step."""

from typing import Any

from kmodels.core.errors import InputError
from kmodels.memory.sizes import BlockSizes, Sizes
from kmodels.models.common.config import BlockConfig, DecoderConfig
from kmodels.models.common.encoder.config import EncoderConfig


def sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of a decoder and of each of its blocks."""
    blocks = [config.block(i) for i in range(config.num_layers)]
    return Sizes(
        blocks=tuple(map(_of_block, blocks)),
        width=config.hidden_dim,
        vocabulary=config.vocabulary_size,
        gated=True,
        causal=config.is_causal,
    )


def _of_block(block: BlockConfig) -> BlockSizes:
    return BlockSizes(
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


def encoder(config: EncoderConfig, **more: Any) -> Sizes:
    """Returns the sizes of a model of `EncoderBlock`s.

    Args:
        config: config of the family.
        **more: what the blocks do not tell: `tokens` where an image decides them, and
            `vocabulary` where logits over it are computed.
    """
    held = config.encoder_block
    block = BlockSizes(
        heads=held.num_heads,
        groups=held.num_heads,
        head_dim=config.hidden_dim // held.num_heads,
        mlp_dim=held.mlp_dim,
        head_norms=held.use_query_key_norm,
        dropout=held.dropout,
        attention_dropout=held.attention_dropout,
    )
    return Sizes(
        blocks=(block,) * config.num_layers,
        width=config.hidden_dim,
        gated=held.gated,
        causal=held.causal,
        **more,
    )


def without_images(config: Any) -> Sizes:
    """Raises `InputError`: the images of a step are not counted."""
    raise InputError(
        "the memory of images is not planned; plan the text of the model by its own name, such as "
        "gemma3_4b_text, and leave room for the tower"
    )
