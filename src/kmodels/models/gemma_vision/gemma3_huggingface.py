"""SigLIP's tower and a projector, as directories of image-text models hold them."""

from collections.abc import Mapping
from typing import Any

from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import clip_siglip
from kmodels.weights import Rule

# Names of the tower's settings: here, in config.json, and what transformers takes without them.
SETTINGS = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "intermediate_dim": ("intermediate_size", 3072),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
# What is alike in all of them; a head of the tower is not asked for.
FIXED = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
}


def settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Returns the arguments of the encoder, and which settings it has no counterpart for.

    Args:
        vision: `vision_config` of a config.json.
    """
    found = {ours: vision.get(name, usual) for ours, (name, usual) in SETTINGS.items()}
    said = {name: vision.get(name, usual) for name, usual in FIXED.items()}
    return found, {
        f"{name}={x!r} of the vision tower": x != FIXED[name] for name, x in said.items()
    }


def form(encoder: Gemma3VisionEncoder) -> dict[str, Any]:
    """Returns the `vision_config` of an encoder."""
    found = {theirs: getattr(encoder, ours) for ours, (theirs, _) in SETTINGS.items()}
    return {**found, **FIXED, "vision_use_head": False}


def rules(config: ViTConfig, tower: str, projector: str) -> list[Rule]:
    """Returns the table of an encoder.

    Args:
        config: config of its tower.
        tower: prefix of the tower's names.
        projector: prefix of the projector's.
    """
    return [
        Rule(f"{projector}mm_input_projection_weight", "input_projection/kernel"),
        Rule(f"{projector}mm_soft_emb_norm.weight", "soft_embedding_norm/scale"),
        *clip_siglip.rules(config, tower),
    ]
