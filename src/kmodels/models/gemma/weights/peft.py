"""Names of Gemma's layers in transformers, under which PEFT keeps adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

_LAYERS = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
# The text models with their head and without it, then the text part of Gemma 3's multimodal ones in
# transformers 5, 4, and without their head.
# The embedding table is their head too. Only PEFT's copy of it has a name of its own.
HEADS = ("lm_head", "language_model.lm_head")
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


def names(model: Any) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    alone = getattr(model, "backbone", model) is model
    prefixes = sorted(PREFIXES, key=bool) if alone else PREFIXES
    return [
        {f"block_{{i}}/{ours}": f"{prefix}layers.{{i}}.{x}" for ours, x in _LAYERS.items()}
        | {"token_embedding": f"{prefix}embed_tokens"}
        for prefix in prefixes
    ] + [{"token_embedding": head} for head in HEADS]
