"""The vision tower of Gemma 4 in transformers' files: names of tensors and of settings."""

from collections.abc import Mapping
from typing import Any

from kmodels.models.gemma_vision.gemma4_encoder import BOUNDS, Gemma4VisionEncoder
from kmodels.weights import Rule, transpose

KIND = "gemma4_vision"
# Arguments of the layer, with the settings of the same meaning and their usual values.
SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 16),
    "intermediate_dim": ("intermediate_size", 3072),
    "head_dim": ("head_dim", 64),
    "num_key_value_heads": ("num_key_value_heads", 12),
    "pool_size": ("pooling_kernel_size", 3),
    "position_embedding_size": ("position_embedding_size", 10_240),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
    "dropout": ("attention_dropout", 0.0),
    "use_clipped_linears": ("use_clipped_linears", False),
    "standardize": ("standardize", False),
}
ROPE = {"rope_type": "axial", "rope_theta": 100.0}
# The published files have the older name.
AXIAL = ("axial", "default")
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
}
LAYERS = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": "mlp.down_proj",
}
PREFIX, PROJECTOR = "model.vision_tower.", "model.embed_vision."
BLOCK = f"{PREFIX}encoder.layers.{{i}}."


def rules(encoder: Gemma4VisionEncoder) -> list[Rule]:
    """Returns the table, whose names are those of the published files."""
    front = f"{PREFIX}patch_embedder."
    table = [
        Rule(f"{front}input_proj.weight", "patch_embedding/kernel", transpose),
        Rule(f"{front}position_embedding_table", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]
    for theirs, ours in NORMS.items():
        table.append(Rule(f"{BLOCK}{theirs}.weight", f"block_{{i}}/{ours}/scale"))
    for ours, theirs in LAYERS.items():
        place = f"block_{{i}}/{ours}"
        table.append(Rule(f"{BLOCK}{theirs}.linear.weight", f"{place}/kernel", transpose))
        if encoder.use_clipped_linears:
            table += [Rule(f"{BLOCK}{theirs}.{name}", f"{place}/{name}") for name in BOUNDS]
    if encoder.standardize:
        table += [Rule(f"{PREFIX}{name}", name) for name in ("std_bias", "std_scale")]
    return table


def settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Returns the arguments that a vision_config says, and what the layer has no counterpart for.

    Args:
        vision: the vision_config.
    """
    held = {ours: vision.get(theirs, usual) for ours, (theirs, usual) in SETTINGS.items()}
    rope = {**ROPE, **(vision.get("rope_parameters") or {})}
    activation = vision.get("hidden_activation", "gelu_pytorch_tanh")
    kind = vision.get("model_type", KIND)
    held |= {"rope_max_wavelength": rope["rope_theta"], "dropout": held["dropout"] or 0.0}
    return held, {
        f"model_type={kind!r} of the vision_config": kind != KIND,
        f"hidden_activation={activation!r} of the vision tower": activation != "gelu_pytorch_tanh",
        "attention_bias of the vision tower": vision.get("attention_bias"),
        f"rope_type={rope['rope_type']!r} of the vision tower": rope["rope_type"] not in AXIAL,
    }


def form(encoder: Gemma4VisionEncoder) -> dict[str, Any]:
    """Returns the vision_config of a layer."""
    held = {theirs: getattr(encoder, ours) for ours, (theirs, _) in SETTINGS.items()}
    rope = {**ROPE, "rope_theta": encoder.rope_max_wavelength}
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    return {"model_type": KIND, **held, **activation, "rope_parameters": rope}
