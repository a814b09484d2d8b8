"""Hugging Face directories of Gemma 3 with its vision encoder."""

import math
from pathlib import Path
from typing import Any

import keras

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.image_text import huggingface as image_text
from kmodels.models.gemma.family import transformers_form as form_of_text
from kmodels.models.gemma.weights import huggingface as text
from kmodels.models.gemma_vision.config import Gemma3ImageTextConfig
from kmodels.models.vit.weights import clip_siglip
from kmodels.weights import Rule

# Names of the tower's settings: here, in config.json, and what transformers takes without them.
VISION = {
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
TOKENS, IMAGE_TOKEN = "mm_tokens_per_image", "image_token_index"
DEFAULTS = {TOKENS: 256, IMAGE_TOKEN: 262_144}
MARKS = {"boi_token_index": 255_999, "eoi_token_index": 256_000}


def rules(
    config: Gemma3ImageTextConfig,
    language: str = image_text.TEXTS[0],
    tower: str = image_text.TOWERS[0],
    projector: str = image_text.PROJECTORS[0],
) -> list[Rule]:
    """Returns the table; the prefixes are those of the file."""
    vision = [
        Rule(f"{projector}mm_input_projection_weight", "input_projection/kernel"),
        Rule(f"{projector}mm_soft_emb_norm.weight", "soft_embedding_norm/scale"),
        *clip_siglip.rules(config.encoder(name="vision_encoder").vit_config, tower),
    ]
    return [*text.rules(config, language), *image_text.below("vision_encoder", vision)]


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    vision, given = description.get("vision_config") or {}, {**DEFAULTS, **description}
    held = {ours: vision.get(name, usual) for ours, (name, usual) in VISION.items()}
    side, tokens = held["image_size"] // held["patch_size"], math.isqrt(given[TOKENS])
    said = {name: vision.get(name, usual) for name, usual in FIXED.items()}
    wrong = {f"{name}={x!r} of the vision tower": x != FIXED[name] for name, x in said.items()}
    wrong[f"{TOKENS}={given[TOKENS]}"] = tokens**2 != given[TOKENS] or side % tokens != 0
    decoder.refuse(path, wrong)
    return {
        **text.backbone_fields(path, description),
        "vision_encoder": {**held, "pool_size": side // tokens},
        "image_token_id": given[IMAGE_TOKEN],
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns config.json, preprocessor_config.json, the table, and no tensors of zeros.

    Args:
        model: a backbone or causal model.

    Raises:
        InputError: for settings that transformers cannot express.
    """
    config = getattr(model, "backbone", model).config
    written = form_of_text(model)[0]
    encoder = config.encoder(name="vision_encoder")
    vision = {theirs: getattr(encoder, ours) for ours, (theirs, _) in VISION.items()}
    form = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": written,
        "vision_config": {**vision, **FIXED, "vision_use_head": False},
        TOKENS: encoder.num_vision_tokens_per_image,
        IMAGE_TOKEN: config.image_token_id,
        **MARKS,
        "tie_word_embeddings": True,
        **{name: written[name] for name in ("eos_token_id",) if name in written},
    }
    return form, {}, rules(config), {}


FORMAT = image_text.ImageTextFormat("gemma3", Gemma3ImageTextConfig, fields, rules)
