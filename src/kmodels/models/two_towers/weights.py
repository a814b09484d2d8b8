"""Hugging Face directories with both towers, the named sizes, and the family."""

from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks import huggingface
from kmodels.models.blocks.directories import EncoderDirectory
from kmodels.models.blocks.encoder_rules import below, dense
from kmodels.models.blocks.sizes import encoder
from kmodels.models.blocks.text_encoder_files import OLD, PREFIX, PROJECTION, TextTowerFormat
from kmodels.models.clip import FORMAT as CLIP
from kmodels.models.clip import PRESETS as CLIP_TEXTS
from kmodels.models.siglip import FORMAT as SIGLIP
from kmodels.models.siglip import PRESETS as SIGLIP_TEXTS
from kmodels.models.two_towers.model import TwoTowersBackbone, TwoTowersConfig
from kmodels.models.two_towers.task import ImageTextSimilarity
from kmodels.models.vit.preprocessor import OF_PATCHES, fit_crop
from kmodels.models.vit.presets import PRESETS as IMAGES
from kmodels.models.vit.weights import clip_siglip, huggingface_export
from kmodels.models.vit.weights.huggingface_config import picture_form, takes_patches
from kmodels.registry import Family
from kmodels.weights import Rule, SourceCheckpoint, reshape

# === Hugging Face ===

KINDS = ("clip", "siglip", "siglip2")
NATIVE = "bilinear_antialias"


def text_format(projects: bool) -> TextTowerFormat:
    """Returns the format of the text tower: CLIP's if the towers are projected, else SigLIP's."""
    return CLIP if projects else SIGLIP


def rules(config: TwoTowersConfig) -> list[Rule]:
    """Returns the rules of a directory with both towers."""
    projects, flat = config.projects, config.vision.position_interpolation == NATIVE
    vision = clip_siglip.rules(config.vision, clip_siglip.PREFIX, flat=flat)
    text = text_format(projects).tower_rules(PREFIX)
    # SigLIP stores scale and bias with shape (1,), CLIP with shape ().
    number = reshape((), ()) if projects else reshape((1,), ())
    names = {"visual_projection": "vision_projection", PROJECTION: PROJECTION}
    return [
        *below("vision_encoder", vision),
        *below("text_encoder", text),
        *(rule for rule in dense(names) if not rule.source.endswith("bias")),
        Rule("logit_scale", "similarity/logit_scale", number),
        Rule("logit_bias", "similarity/logit_bias", number),
    ]


class TwoTowersFormat(EncoderDirectory):
    """Directories with both towers, as `Family.formats` expects them."""

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads config, tokenizer and image settings of a directory, and opens its tensors.

        Raises:
            InputError: for settings that are not supported, or a directory with one tower.
        """
        projects = description["model_type"] == "clip"
        vision = clip_siglip.FORMAT.open_checkpoint(path, description, {}, weights=False)
        classes = any("Classification" in x for x in description.get("architectures") or ())
        if classes or (not projects and vision.task["pooling"] != "map"):
            raise InputError(
                f"{path} has no vectors of images that go with texts; read it as a "
                "ViTImageClassifier"
            )
        width = description.get("projection_dim", CLIP.defaults["projection_dim"])
        backbone = {
            "vision_encoder": vision.backbone,
            "text_encoder": text_format(projects).fields(path, description),
            "projection_dim": width if projects else None,
            # Some models of type siglip2 are for square images, with SigLIP's processor.
            "naflex": description["model_type"] == "siglip2" and takes_patches(path),
        }
        tensors = self.tensors(path, description, weights)
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
    """Returns (config.json, preprocessor_config.json, rules, {}): there is no zero tensor.

    Raises:
        InputError: for settings that transformers does not support.
    """
    backbone = getattr(model, "backbone", model)
    config = backbone.config
    wanted = "clip" if config.projects else "siglip"
    vision, _, _, zeros = huggingface_export.transformers_form(backbone.vision_encoder)
    if zeros or not vision["model_type"].startswith(wanted):
        raise InputError(
            f"transformers' {wanted} has no counterpart for the vision tower, which is a "
            f"{vision['model_type']}"
        )
    # Keys of a directory with the vision tower alone.
    for name in ("architectures", "vision_use_head"):
        vision.pop(name, None)
    preprocessor = getattr(model, "preprocessor", None)
    pictures = picture_form(getattr(preprocessor, "image_preprocessor", None))
    if pictures and "max_num_patches" not in pictures:
        name = "CLIP" if config.projects else "Siglip"
        pictures["image_processor_type"] = f"{name}ImageProcessor"
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


# === Presets ===


def _backbone_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a preset's backbone, without those of its task."""
    return {name: value for name, value in fields.items() if not name.startswith("task_")}


def _clip(vision: str, text: str, width: int) -> dict[str, Any]:
    return {
        "vision_encoder": _backbone_fields(IMAGES[vision]),
        "text_encoder": _backbone_fields(CLIP_TEXTS[text]),
        "projection_dim": width,
    }


def _siglip() -> dict[str, dict[str, Any]]:
    """Returns the presets of SigLIP, named after their vision tower as in keras-hub."""
    presets = {}
    for name, vision in IMAGES.items():
        kind, _, size = name.partition("_")
        if kind in ("siglip", "siglip2"):
            size = size.partition("_")[0].replace("giantopt", "giant")
            text = _backbone_fields(SIGLIP_TEXTS[f"{kind}_text_{size}"])
            presets[name] = {"vision_encoder": _backbone_fields(vision), "text_encoder": text}
    return presets


def _naflex(size: str) -> dict[str, Any]:
    native = {"position_interpolation": "bilinear_antialias"}
    return {
        "vision_encoder": _backbone_fields(IMAGES[f"siglip2_{size}_patch16_256"]) | native,
        "text_encoder": _backbone_fields(SIGLIP_TEXTS[f"siglip2_text_{size}"]),
        "naflex": True,
    }


MICRO: dict[str, Any] = {
    **{"image_shape": (28, 28, 1), "patch_size": 7, "num_layers": 4},
    **{"num_heads": 4, "hidden_dim": 128, "mlp_dim": 256},
}
MICRO_TEXT: dict[str, Any] = {
    **{"embedding_dim": 128, "hidden_dim": 128, "num_layers": 2, "num_heads": 4},
    **{"intermediate_dim": 256, "max_sequence_length": 16},
}
TEXTS = {"clip": CLIP_TEXTS["clip_text_debug"], "siglip": SIGLIP_TEXTS["siglip_text_debug"]}
PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2021 (arXiv:2103.00020), tables 19 and 20; names are keras-hub's.
    "clip_vit_base_patch32": _clip("clip_base_patch32_224", "clip_text_base", 512),
    "clip_vit_base_patch16": _clip("clip_base_patch16_224", "clip_text_base", 512),
    "clip_vit_large_patch14": _clip("clip_large_patch14_224", "clip_text_large", 768),
    "clip_vit_large_patch14_336": _clip("clip_large_patch14_336", "clip_text_large", 768),
    # OpenCLIP's (Cherti et al. 2023, arXiv:2212.07143).
    "clip_vit_h_14_laion2b_s32b_b79k": _clip("clip_huge_patch14_224", "clip_text_huge", 1024),
    "clip_vit_bigg_14_laion2b_39b_b160k": _clip(
        "clip_gigantic_patch14_224", "clip_text_bigg", 1280
    ),
    # Zhai et al. 2023 and Tschannen et al. 2025; sources are with the presets of each tower.
    **_siglip(),
    # With native aspect ratio (NaFlex); the position embedding is that of 256 patches.
    **{f"siglip2_{size}_patch16_naflex": _naflex(size) for size in ("base", "so400m")},
    # Small enough to train on two cores, on Fashion-MNIST.
    **{
        f"{kind}_micro_patch7_28": {
            "vision_encoder": _backbone_fields(IMAGES[name]) | MICRO,
            "text_encoder": _backbone_fields(TEXTS[kind]) | MICRO_TEXT,
            **({"projection_dim": 64} if kind == "clip" else {}),
        }
        for kind, name in {
            "clip": "clip_base_patch32_224",
            "siglip": "siglip_base_patch16_224",
        }.items()
    },
    # Below 100,000 parameters.
    "clip_debug": {
        "vision_encoder": _backbone_fields(IMAGES["clip_base_patch32_224"])
        | {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2}
        | {"num_heads": 2, "hidden_dim": 32, "mlp_dim": 64},
        "text_encoder": _backbone_fields(CLIP_TEXTS["clip_text_debug"]),
        "projection_dim": 24,
    },
    "siglip_debug": {
        "vision_encoder": _backbone_fields(IMAGES["siglip_base_patch16_224"])
        | {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2}
        | {"num_heads": 2, "hidden_dim": 32, "mlp_dim": 64},
        "text_encoder": _backbone_fields(SIGLIP_TEXTS["siglip_text_debug"]),
    },
}

# === Family ===


def _fit_preprocessor(settings: dict[str, Any], config: TwoTowersConfig) -> dict[str, Any]:
    """Returns `settings`, by default with the sequence length and image size of the towers."""
    kind = "clip" if config.projects else "siglip"
    length = {"kind": kind, "sequence_length": config.text.max_sequence_length}
    arguments = fit_crop({**length, **settings}, config.vision.image_shape[:2])
    if config.naflex:
        most = {"max_num_patches": config.vision.num_positions}
        return {**most, **arguments, "patch_size": config.vision.patch_size}
    return {name: value for name, value in arguments.items() if name not in OF_PATCHES}


FAMILY = Family(
    name="two_towers",
    backbone=TwoTowersBackbone,
    tasks=(ImageTextSimilarity,),
    presets=PRESETS,
    formats=(TwoTowersFormat(KINDS),),
    # Of the vision tower, the larger one in the published models.
    sizes=lambda config: encoder(config.vision, tokens=config.vision.num_tokens),
    transformers_form=transformers_form,
    fit_preprocessor=_fit_preprocessor,
)
