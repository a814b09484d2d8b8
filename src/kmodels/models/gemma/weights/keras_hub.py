"""Paths of the variables in keras-hub's Gemma 1, 2 and 3 (0.32)."""

import numpy as np

from kmodels.models.gemma.config import GemmaConfig
from kmodels.weights import Rule, Transform, reshape

BLOCK = "decoder_block_{i}"


def _heads_first(heads: int, width: int, head_dim: int) -> Transform:
    """(N, D, H) <-> (D, N * H)."""
    return Transform(
        lambda x: np.transpose(x, (1, 0, 2)).reshape(width, heads * head_dim),
        lambda x: np.transpose(x.reshape(width, heads, head_dim), (1, 0, 2)),
    )


def rules(config: GemmaConfig) -> list[Rule]:
    """Returns the table of one generation."""
    width, size = config.hidden_dim, config.head_dim
    queries = _heads_first(config.num_query_heads, width, size)
    groups = _heads_first(config.num_key_value_heads, width, size)
    joined = reshape((config.num_query_heads, size, width), (config.num_query_heads * size, width))
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
        Rule(f"{BLOCK}/attention/query/kernel", "block_{i}/attention/query/kernel", queries),
        Rule(f"{BLOCK}/attention/key/kernel", "block_{i}/attention/key/kernel", groups),
        Rule(f"{BLOCK}/attention/value/kernel", "block_{i}/attention/value/kernel", groups),
        Rule(
            f"{BLOCK}/attention/attention_output/kernel",
            "block_{i}/attention/output/kernel",
            joined,
        ),
        *(Rule(f"{BLOCK}/{a}/kernel", f"block_{{i}}/{b}/kernel") for a, b in kernels.items()),
        *(Rule(f"{BLOCK}/{a}/scale", f"block_{{i}}/{b}/scale") for a, b in norms.items()),
        Rule("final_normalization/scale", "final_norm/scale"),
    ]
