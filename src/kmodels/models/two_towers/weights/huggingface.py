"""Hugging Face directories of CLIP, SigLIP and SigLIP 2 with both towers."""

from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.clip import FORMAT as CLIP
from kmodels.models.common import huggingface
from kmodels.models.common.encoder.huggingface import OLD, PREFIX, PROJECTION, TextTowerFormat
from kmodels.models.common.encoder.rules import dense
from kmodels.models.common.image_text.huggingface import below
from kmodels.models.common.unknown_settings import warn_of_encoder
from kmodels.models.siglip import FORMAT as SIGLIP
from kmodels.models.two_towers.config import TwoTowersConfig
from kmodels.models.vit import ViTBackbone, ViTImageClassifierPreprocessor
from kmodels.models.vit.exports import huggingface as vision_export
from kmodels.models.vit.exports.patches import patch_form
from kmodels.models.vit.exports.pictures import picture_form
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
from kmodels.models.vit.weights import clip_siglip
from kmodels.models.vit.weights.huggingface_config import takes_patches
from kmodels.weights import Rule, SourceCheckpoint, read_safetensors, reshape

KINDS = ("clip", "siglip", "siglip2")
NATIVE = "bilinear_antialias"
TOWERS = ("vision_config", "text_config")


def text_format(projects: bool) -> TextTowerFormat:
    """Returns the format of the text tower."""
    return CLIP if projects else SIGLIP


def rules(config: TwoTowersConfig) -> list[Rule]:
    """Returns the table."""
    projects, flat = config.projects, config.vision.position_interpolation == NATIVE
    vision = clip_siglip.rules(config.vision, clip_siglip.PREFIX, flat=flat)
    text = text_format(projects).tower_rules(PREFIX)
    # SigLIP keeps its numbers as rows of one.
    number = reshape((), ()) if projects else reshape((1,), ())
    names = {"visual_projection": "vision_projection", PROJECTION: PROJECTION}
    return [
        *below("vision_encoder", vision),
        *below("text_encoder", text),
        *(rule for rule in dense(names) if not rule.source.endswith("bias")),
        Rule("logit_scale", "similarity/logit_scale", number),
        Rule("logit_bias", "similarity/logit_bias", number),
    ]


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns whether a directory with this config.json is of this format."""
    return path.is_dir() and description.get("model_type") in KINDS


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> SourceCheckpoint:
    """Understands a directory, with its tokenizer and how it prepares images.

    Args:
        path: path of the directory.
        description: the object in its config.json.
        given: unused; the file says it all.
        weights: False where only the architecture is wanted and no tensors need be there.

    Raises:
        InputError: for settings that the model has no counterpart for, or one tower alone.
    """
    projects = description["model_type"] == "clip"
    vision = clip_siglip.open_checkpoint(path, description, {}, weights=False)
    classes = any("Classification" in x for x in description.get("architectures") or ())
    if classes or (not projects and vision.task["pooling"] != "map"):
        raise InputError(
            f"{path} has no vectors of images that go with texts; read it as a ViTImageClassifier"
        )
    width = description.get("projection_dim", CLIP.defaults["projection_dim"])
    backbone = {
        "vision_encoder": vision.backbone,
        "text_encoder": text_format(projects).fields(path, description),
        "projection_dim": width if projects else None,
        # Some files of this kind were made for square images, with the processor of SigLIP.
        "naflex": description["model_type"] == "siglip2" and takes_patches(path),
    }
    tensors = read_safetensors(path) if weights else {}
    if weights:
        warn_of_encoder(path, description)
    if weights and not any(name.startswith(PREFIX) for name in tensors):
        raise InputError(
            f"{path} holds no text tower; read it as a ViTBackbone, or give a whole directory"
        )
    old = (clip_siglip.PREFIX + clip_siglip.OLD, PREFIX + OLD)
    tokenizer = huggingface.tokenizer_of(path)
    preprocessor = None
    if vision.preprocessor is not None and tokenizer is not None:
        preprocessor = {**vision.preprocessor, **tokenizer}
    return SourceCheckpoint(
        path=path,
        kind="Hugging Face",
        backbone=backbone,
        task={},
        preprocessor=preprocessor,
        tensors={name: x for name, x in tensors.items() if name not in old},
        rules=rules(TwoTowersConfig(**backbone)),
    )


def transformers_form(model: keras.Model) -> huggingface.TransformersForm:
    """Returns config.json, preprocessor_config.json, the table, and no tensors of zeros.

    Args:
        model: a backbone or task.

    Raises:
        InputError: for settings that transformers cannot express.
    """
    backbone = getattr(model, "backbone", model)
    config = backbone.config
    vision, pictures = _vision(model, config)
    kind = vision["model_type"].removesuffix("_vision_model")
    form: dict[str, Any] = {
        "architectures": [f"{'CLIP' if kind == 'clip' else kind.capitalize()}Model"],
        "model_type": kind,
        "vision_config": vision,
        "text_config": {
            "model_type": f"{kind}_text_model",
            **text_format(config.projects).form(config.text),
            **huggingface.token_ids(model),
        },
    }
    if config.projects:
        form["projection_dim"] = config.projection_dim
    return form, pictures, rules(config), {}


def _vision(model: keras.Model, config: TwoTowersConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what transformers says of the tower of the images, and of their preprocessing."""
    tower: ViTBackbone = getattr(model, "backbone", model).vision_encoder
    described, _, _, zeros = vision_export.transformers_form(tower)
    wanted = "clip" if config.projects else "siglip"
    if zeros or not described["model_type"].startswith(wanted):
        raise InputError(
            f"transformers' {wanted} has no counterpart for the vision tower, which is a "
            f"{described['model_type']}"
        )
    # What is said of a tower alone.
    for name in ("architectures", "vision_use_head"):
        described.pop(name, None)
    images = getattr(getattr(model, "preprocessor", None), "image_preprocessor", None)
    return described, {} if images is None else _pictures(images, config.projects)


def _pictures(
    images: ViTImageClassifierPreprocessor | NaFlexViTImageClassifierPreprocessor, projects: bool
) -> dict[str, Any]:
    """Returns preprocessor_config.json."""
    if isinstance(images, NaFlexViTImageClassifierPreprocessor):
        return patch_form(images)
    return {
        **picture_form(images),
        "image_processor_type": f"{'CLIP' if projects else 'Siglip'}ImageProcessor",
    }
