"""Names of a decoder's modules in transformers, under which PEFT keeps adapters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

LAYERS = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# Norms of the usual decoder; a family with other names gives its own.
NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}
# Those of models with per-layer embeddings, in each block and beside the blocks.
PER_LAYER = {
    "per_layer/input_gate": "per_layer_input_gate",
    "per_layer/projection": "per_layer_projection",
}
# In models with experts, the projection of a router, and the tensors of all experts.
ROUTER = {"experts/router/projection": "router.proj"}
EXPERTS = {"experts/gate_up": "experts.gate_up_proj", "experts/down": "experts.down_proj"}
MODEL_PROJECTION = "per_layer_model_projection"
# An output layer with a table of its own.
OUTPUT = "token_embedding/reverse_embeddings"
# A model with its head, and without.
PREFIXES = ("model.", "")


def names(
    model: "keras.Model",
    prefixes: Sequence[str] = PREFIXES,
    heads: Sequence[str] = ("lm_head",),
    norms: Mapping[str, str] = NORMS,
) -> Sequence[Mapping[str, str]]:
    """Returns the tables of `Backbone.peft_names`, the one that is written first.

    Prefixes and heads, the names of the output layer, begin with the most usual one; an empty
    prefix is that of a bare model. If the output layer is the embedding table, only PEFT's copy of
    it has such a name. `norms` has their names by their paths in a block.
    """
    backbone = getattr(model, "backbone", model)
    ordered = sorted(prefixes, key=bool) if backbone is model else prefixes
    layers, beside = LAYERS, {"token_embedding": "embed_tokens", "final_norm": "norm"}
    if backbone.per_layer_embedding is not None:
        layers = {**LAYERS, **PER_LAYER}
        beside["per_layer_embedding/model_projection"] = MODEL_PROJECTION
    if backbone.config.block(0).num_experts:
        layers = {**layers, **ROUTER, **EXPERTS}
    layers = {**layers, **norms}
    tied = backbone.config.tie_word_embeddings
    outputs = [{"token_embedding" if tied else OUTPUT: head} for head in heads]
    own_head = {} if tied else outputs[0]
    return [
        {f"block_{{i}}/{ours}": f"{prefix}layers.{{i}}.{x}" for ours, x in layers.items()}
        | {ours: f"{prefix}{x}" for ours, x in beside.items()}
        | own_head
        for prefix in ordered
    ] + outputs
