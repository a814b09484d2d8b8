"""Names of Gemma's linear layers in transformers, under which PEFT keeps adapters."""

PREFIX = "model."

_LAYERS = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}

# The text models, then the text part of Gemma 3's multimodal ones in transformers 5 and 4.
NAMES = tuple(
    {f"block_{{i}}/{ours}": f"{prefix}layers.{{i}}.{theirs}" for ours, theirs in _LAYERS.items()}
    for prefix in ("model.", "model.language_model.", "language_model.model.")
)
