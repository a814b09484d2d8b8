"""Paths of the variables in keras-hub's Gemma 1 to 4 (0.32)."""

from kmodels.models.common.keras_hub_mapping import decoder_attention
from kmodels.models.gemma.config import GemmaConfig
from kmodels.weights import Rule, reshape

BLOCK = "decoder_block_{i}"
PER_LAYER = {
    "per_layer_input_gate": "per_layer/input_gate",
    "per_layer_up_proj": "per_layer/projection",
}


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
    table = [
        Rule("token_embedding/embeddings", "token_embedding/embeddings"),
        *decoder_attention(config, BLOCK, "attention_output"),
        Rule("final_normalization/scale", "final_norm/scale"),
    ]
    if config.hidden_size_per_layer_input:
        theirs, ours = "per_layer", "per_layer_embedding"
        kernels |= PER_LAYER
        norms["post_per_layer_input_norm"] = "per_layer/norm"
        table += [
            Rule(f"{theirs}_token_embedding/embeddings", f"{ours}/table/embeddings"),
            Rule(f"{theirs}_model_projection/kernel", f"{ours}/model_projection/kernel"),
            Rule(f"{theirs}_projection_norm/scale", f"{ours}/norm/scale"),
        ]
    if config.use_layer_scalar:
        table.append(Rule(f"{BLOCK}/layer_scalar", "block_{i}/layer_scalar", reshape((), (1,))))
    table += [Rule(f"{BLOCK}/{a}/kernel", f"block_{{i}}/{b}/kernel") for a, b in kernels.items()]
    table += [Rule(f"{BLOCK}/{a}/scale", f"block_{{i}}/{b}/scale") for a, b in norms.items()]
    return table
