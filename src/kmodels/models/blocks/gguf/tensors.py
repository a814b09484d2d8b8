"""Names and contents of a decoder's tensors in llama.cpp's files."""

from collections.abc import Mapping

import numpy as np

from kmodels.models.blocks.config import DecoderConfig
from kmodels.weights import Rule, Transform, identity, transpose

BLOCK = "blk.{i}"
TABLE, OUTPUT = "token_embd.weight", "output.weight"
KERNELS = {
    "attn_q": "attention/query",
    "attn_k": "attention/key",
    "attn_v": "attention/value",
    "attn_output": "attention/output",
    "ffn_gate": "mlp/gate",
    "ffn_up": "mlp/up",
    "ffn_down": "mlp/down",
}
# Names of the usual norms; a family with more gives its own.
NORMS = {"attn_norm": "attention_norm", "ffn_norm": "mlp_norm"}
HEAD_NORMS = {"attn_q_norm": "attention/query_norm", "attn_k_norm": "attention/key_norm"}
# Per-layer embeddings: the kernels inside a block, and the table outside.
PER_LAYER = {"inp_gate": "per_layer/input_gate", "proj": "per_layer/projection"}
PER_LAYER_TABLE = "per_layer_token_embd.weight"
# Divisors of the frequencies of the pairs of channels: 1 with rotation, `STILL` without.
ROPE_FACTORS, STILL = "rope_freqs.weight", 1e30

# Norms are stored with the 1 added that models with a `norm_offset` add themselves.
# In float32: bfloat16 has no place for the sum of 1 and a small weight.
plus_one = Transform(lambda x: x.astype("float32") - 1, lambda x: x.astype("float32") + 1)


def adjacent(heads: int) -> Transform:
    """Linear weights whose pairs of channels are adjacent rows <-> kernels with two halves."""

    def forward(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, -1, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape).T

    def inverse(x: np.ndarray) -> np.ndarray:
        return x.T.reshape(heads, 2, -1, x.shape[0]).swapaxes(1, 2).reshape(x.T.shape)

    return Transform(forward, inverse)


def rules(config: DecoderConfig, norms: Mapping[str, str]) -> list[Rule]:
    """Returns the table of a decoder; `norms` has their names of a block's norms to ours."""
    scale = plus_one if config.norm_offset else identity
    table = [
        Rule(TABLE, "token_embedding/embeddings"),
        Rule("output_norm.weight", "final_norm/scale", scale),
    ]
    if not config.tie_word_embeddings:
        table.append(Rule(OUTPUT, "token_embedding/reverse_embeddings"))
    block = config.block(0)
    if block.per_layer_dim:
        within = "per_layer_embedding"
        table += [
            Rule(PER_LAYER_TABLE, f"{within}/table/embeddings"),
            Rule("per_layer_model_proj.weight", f"{within}/model_projection/kernel", transpose),
            Rule("per_layer_proj_norm.weight", f"{within}/norm/scale", scale),
        ]
        norms = {**norms, "post_norm": "per_layer/norm"}
    if block.use_layer_scalar:
        table.append(Rule(f"{BLOCK}.layer_output_scale.weight", "block_{i}/layer_scalar"))
    for source, target in (KERNELS | (PER_LAYER if block.per_layer_dim else {})).items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/kernel", transpose))
    for source, target in norms.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/scale", scale))
    return table


def unused(config: DecoderConfig) -> list[str]:
    """Returns keys and values of layers that use those of others.

    Published checkpoints hold them, and llama.cpp's converter copies them.
    """
    blocks = [(i, config.block(i)) for i in range(config.num_layers)]
    shared = [i for i, block in blocks if block.key_value_source is not None]
    names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    return [f"{BLOCK.format(i=i)}.{name}" for i in shared for name in names]


def rope_factors(head_dim: int, turned: float) -> np.ndarray:
    """Returns `ROPE_FACTORS`, the divisors of the frequencies of the pairs of channels."""
    count = int(turned * head_dim // 2)
    return np.array([1.0] * count + [STILL] * (head_dim // 2 - count), "float32")
