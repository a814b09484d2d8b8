"""Hugging Face directories of CLIP, SigLIP and SigLIP 2: their vision tower.

Alone, with CLIP's projection, with a classifier, or with the text tower, which is left out.
"""

import math
from pathlib import Path
from typing import Any

from kmodels.models.blocks import encoder_rules
from kmodels.models.blocks.encoder_rules import prefix_of
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import huggingface_config
from kmodels.models.vit.weights.huggingface_config import Tensors, ViTFormat, checkpoint
from kmodels.weights import (
    Rule,
    SourceCheckpoint,
    leading_axes,
    patch_kernel,
    transpose,
)

CLIP = ("clip", "clip_vision_model")
SIGLIP = ("siglip", "siglip_vision_model")
# The model with native aspect ratio; its siblings of fixed size call themselves SigLIP.
SIGLIP2 = ("siglip2", "siglip2_vision_model")
PREFIX = "vision_model."
POSITIONS = "embeddings.position_embedding.weight"
# The text tower, and position ids of older files.
OTHERS = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
OLD = "embeddings.position_ids"
PARTS = ("query", "key", "value")


def rules(config: ViTConfig, prefix: str = "", projects: bool = False, flat: bool = False) -> list:
    """Returns the table; `prefix` is "vision_model." or empty, as the file was written.

    With `projects` the head is CLIP's projection, with `flat` patches are projected as rows, as in
    SigLIP 2, not by a convolution.
    """
    patch = transpose if flat else patch_kernel(config.patch_size, config.image_shape[2])
    table = [
        Rule("embeddings.class_embedding", "tokens/class_token", leading_axes(2)),
        Rule(POSITIONS, "tokens/position_embedding", leading_axes(1)),
        Rule("embeddings.patch_embedding.weight", "patch_embedding/kernel", patch),
        Rule("embeddings.patch_embedding.bias", "patch_embedding/bias"),
        Rule("head.probe", "pooling/probe"),
        Rule(
            "head.attention.in_proj_weight",
            [f"pooling/attention/{part}/kernel" for part in PARTS],
            transpose,
        ),
        Rule("head.attention.in_proj_bias", [f"pooling/attention/{part}/bias" for part in PARTS]),
        *encoder_rules.blocks(),
        *encoder_rules.dense(
            {
                "head.attention.out_proj": "pooling/attention/output",
                "head.mlp.fc1": "pooling/mlp/up",
                "head.mlp.fc2": "pooling/mlp/down",
            }
        ),
        *encoder_rules.norms(
            {
                "pre_layrnorm": "pre_norm",
                "post_layernorm": "final_norm",
                "head.layernorm": "pooling/mlp_norm",
            }
        ),
    ]
    head = "visual_projection" if projects else "classifier"
    return [*encoder_rules.prefixed(prefix, table), *encoder_rules.dense({head: "logits"})]


def _read(path: Path, description: dict[str, Any], tensors: Tensors) -> SourceCheckpoint:
    kind = description["model_type"]
    # The older name takes precedence, as in transformers; null means defaults.
    settings = description.get("vision_config", description)
    vision = description.get("vision_config_dict") or settings or {}
    prefix = prefix_of(tensors, PREFIX)
    classes = huggingface_config.labels(description, tensors, "ForImageClassification")
    head = tensors.get("classifier.weight")
    classes = classes if head is None else head.shape[0]
    left, projection, native = [*OTHERS, f"{prefix}{OLD}"], None, kind in SIGLIP2
    if kind in CLIP:
        backbone, task = _clip(path, vision, classes)
        projection = tensors.get("visual_projection.weight")
        if projection is not None:
            task |= {"num_classes": projection.shape[0], "head_bias": False}
        if classes is not None:
            # The classifier reads tokens that no norm has seen.
            left.append(f"{prefix}post_layernorm.")
    else:
        backbone, task = _siglip(path, vision, classes, native)
        if classes is not None:
            # It takes the mean over the tokens; the attention pooling is there all the same.
            left.append(f"{prefix}head.")
    return checkpoint(
        path,
        backbone,
        task,
        rules=lambda config: rules(config, prefix, projection is not None, native),
        tensors={name: x for name, x in tensors.items() if not name.startswith(tuple(left))},
        positions=prefix + POSITIONS,
        flat=True,
    )


def _clip(path: Path, vision: dict[str, Any], classes: int | None) -> tuple[dict, dict]:
    defaults = {"patch_size": 32, "hidden_act": "quick_gelu"}
    backbone = huggingface_config.backbone_fields(path, defaults | vision) | {
        "layer_norm_epsilon": vision.get("layer_norm_eps", 1e-5),
        "use_patch_bias": False,
        "pre_norm": True,
        "final_norm": classes is None,
    }
    return backbone, {"num_classes": classes, "pooling": "token" if classes is None else "gap"}


def _siglip(
    path: Path, vision: dict[str, Any], classes: int | None, native: bool
) -> tuple[dict, dict]:
    described = {"hidden_act": "gelu_pytorch_tanh"} | vision
    if native:
        described["image_size"] = math.isqrt(vision.get("num_patches", 256)) * vision.get(
            "patch_size", 16
        )
    backbone = huggingface_config.backbone_fields(path, described) | {
        "layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "use_class_token": False,
    }
    if native:
        backbone["position_interpolation"] = "bilinear_antialias"
    maps = vision.get("vision_use_head", True) and classes is None
    return backbone, {"num_classes": classes, "pooling": "map" if maps else "gap"}


FORMAT = ViTFormat((*CLIP, *SIGLIP, *SIGLIP2), _read)
