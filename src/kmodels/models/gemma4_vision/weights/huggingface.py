"""Hugging Face directories of Gemma 4 with its vision half."""

from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.image_text.huggingface import below
from kmodels.models.common.image_text.patch_format import PatchFormat
from kmodels.models.gemma.family import transformers_form as form_of_text
from kmodels.models.gemma.weights import huggingface as text
from kmodels.models.gemma4_vision.config import Gemma4ImageTextConfig
from kmodels.models.vit.gemma4.encoder import Gemma4VisionEncoder
from kmodels.models.vit.weights import gemma4_embedder, gemma4_encoder
from kmodels.weights import Rule

# `model_type` with what reads its vision half, the class, and the setting that is usual there.
KINDS: dict[str, tuple[ModuleType, str, str | None]] = {
    "gemma4": (gemma4_encoder, "Gemma4ForConditionalGeneration", None),
    "gemma4_unified": (gemma4_embedder, "Gemma4UnifiedForConditionalGeneration", "vision"),
}
LANGUAGE, IMAGE_TOKEN = "model.language_model.", "image_token_id"
SEES = "use_bidirectional_attention"


def kind_of(config: Gemma4ImageTextConfig) -> str:
    """Returns the `model_type` of a config."""
    has_tower = isinstance(config.encoder(), Gemma4VisionEncoder)
    return "gemma4" if has_tower else "gemma4_unified"


def rules(config: Gemma4ImageTextConfig, *_: str) -> list[Rule]:
    """Returns the table, with the names that transformers writes."""
    vision = KINDS[kind_of(config)][0].rules(config.encoder())
    return [*text.rules(config, LANGUAGE), *below("vision_encoder", vision)]


def fields(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a config.json.

    Raises:
        InputError: lists the settings that the model has no counterpart for.
    """
    vision, _, usual = KINDS[description["model_type"]]
    held, wrong = vision.settings(description["vision_config"])
    decoder.refuse(path, wrong)
    sees = (description.get("text_config") or {}).get(SEES, usual)
    return {
        **text.backbone_fields(path, description),
        "vision_encoder": held,
        "image_token_id": description.get(IMAGE_TOKEN, Gemma4ImageTextConfig.image_token_id),
        "use_vision_bidirectional_attention": sees == "vision",
    }


def transformers_form(model: keras.Model) -> decoder.TransformersForm:
    """Returns config.json, no preprocessor_config.json, the table, and no tensors of zeros.

    Args:
        model: a backbone or causal model.

    Raises:
        InputError: for settings that transformers cannot express.
    """
    config = getattr(model, "backbone", model).config
    vision, name, _ = KINDS[kind := kind_of(config)]
    sees = "vision" if config.use_vision_bidirectional_attention else None
    written = {**form_of_text(model)[0], "model_type": f"{kind}_text", SEES: sees}
    form = {
        "architectures": [name],
        "model_type": kind,
        "text_config": written,
        "vision_config": vision.form(config.encoder()),
        "audio_config": None,
        IMAGE_TOKEN: config.image_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        **{name: written[name] for name in ("eos_token_id",) if name in written},
    }
    return form, {}, rules(config), {}


FORMATS = tuple(
    PatchFormat(kind, Gemma4ImageTextConfig, fields, rules, "Gemma4ImageConverter")
    for kind in KINDS
)
