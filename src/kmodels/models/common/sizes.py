"""The sizes of a decoder that decide the memory of a step."""

from kmodels.memory.sizes import Sizes
from kmodels.models.common.config import DecoderConfig


def sizes(config: DecoderConfig) -> Sizes:
    """Returns the sizes of a decoder whose blocks differ in their windows alone."""
    blocks = [config.block(i) for i in range(config.num_layers)]
    first = blocks[0]
    return Sizes(
        layers=config.num_layers,
        width=config.hidden_dim,
        heads=first.num_query_heads,
        groups=first.num_key_value_heads,
        head_dim=first.head_dim,
        mlp_dim=first.mlp_dim,
        vocabulary=config.vocabulary_size,
        gated=True,
        post_norms=first.use_post_attention_norm or first.use_post_mlp_norm,
        head_norms=first.use_query_key_norm,
        causal=True,
        windows=tuple(block.window for block in blocks),
        soft_cap=first.soft_cap,
        dropout=first.dropout,
        attention_dropout=first.dropout,
    )
