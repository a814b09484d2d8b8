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
from kmodels.models.vit.weights import siglip_encoder
from kmodels.weights import Rule

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
    encoder = config.encoder(name="vision_encoder")
    vision = siglip_encoder.rules(encoder.vit_config, tower, projector)
    return [*text.rules(config, language), *image_text.below("vision_encoder", vision)]


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    given = {**DEFAULTS, **description}
    held, wrong = siglip_encoder.settings(description["vision_config"] or {})
    side, tokens = held["image_size"] // held["patch_size"], math.isqrt(given[TOKENS])
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
    form = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": written,
        "vision_config": siglip_encoder.form(encoder),
        TOKENS: encoder.num_vision_tokens_per_image,
        IMAGE_TOKEN: config.image_token_id,
        **MARKS,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: written[name] for name in ("eos_token_id",) if name in written},
    }
    return form, {}, rules(config), {}


FORMAT = image_text.ImageTextFormat(
    "gemma3", Gemma3ImageTextConfig, fields, rules, "Gemma3ImageConverter"
)
