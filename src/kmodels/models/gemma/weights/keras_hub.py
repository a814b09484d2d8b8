"""Paths of the variables in keras-hub's Gemma 1 to 4 (0.32)."""

from kmodels.models.common.keras_hub_mapping import decoder_attention, decoder_per_layer
from kmodels.models.gemma.config import GemmaConfig
from kmodels.weights import Rule

BLOCK = "decoder_block_{i}"


def rules(config: GemmaConfig) -> list[Rule]:
    """Returns the table of one generation."""
    norms = {"pre_attention_norm": "attention_norm", "pre_ffw_norm": "mlp_norm"}
    if config.use_post_attention_norm:
        norms["post_attention_norm"] = "post_attention_norm"
    if config.use_post_ffw_norm:
        norms["post_ffw_norm"] = "post_mlp_norm"
    if config.use_query_key_norm:
        norms["attention/query_norm"] = "attention/query_norm"
        norms["attention/key_norm"] = "attention/key_norm"
    kernels = {"ffw_gating": "mlp/gate", "ffw_gating_2": "mlp/up", "ffw_linear": "mlp/down"}
    return [
        Rule("token_embedding/embeddings", "token_embedding/embeddings"),
        *decoder_attention(config, BLOCK, "attention_output"),
        *(Rule(f"{BLOCK}/{a}/kernel", f"block_{{i}}/{b}/kernel") for a, b in kernels.items()),
        *(Rule(f"{BLOCK}/{a}/scale", f"block_{{i}}/{b}/scale") for a, b in norms.items()),
        *decoder_per_layer(config, BLOCK),
        Rule("final_normalization/scale", "final_norm/scale"),
    ]
