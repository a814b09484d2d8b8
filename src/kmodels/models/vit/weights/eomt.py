"""Hugging Face directories of EoMT, on DINOv2 with registers and on DINOv3."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import dinov2, dinov3, huggingface_config
from kmodels.models.vit.weights.huggingface_config import Tensors, ViTFormat, checkpoint
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, leading_axes
from kmodels.weights.rules import Transform

KINDS = ("eomt", "eomt_dinov3")
NAMES = dict(zip(KINDS, ("Eomt", "EomtDinov3"), strict=True))
POSITIONS = "embeddings.position_embeddings.weight"
# Has a length of 0 in models without registers.
REGISTERS = "embeddings.register_tokens"
# Weights of the classes in the loss, which `no_object_weight` says too.
CLASS_WEIGHTS = "criterion.empty_weight"
BLOCK = "layers.{i}"
# Parts of names in DINOv2, and here.
RENAMED = {
    dinov2.BLOCK: BLOCK,
    **{f".attention.attention.{x}": f".attention.{x[0]}_proj" for x in ("query", "key", "value")},
    ".attention.output.dense": ".attention.out_proj",
}
# A setting that no other task has.
SETTING = "num_blocks"
# The settings of the task, with transformers' defaults.
SETTINGS = {
    "num_queries": 200,
    "num_blocks": 4,
    "num_upscale_blocks": 2,
    "no_object_weight": 0.1,
    "class_weight": 2.0,
    "mask_weight": 5.0,
    "dice_weight": 5.0,
    "train_num_points": 12544,
    "oversample_ratio": 3.0,
    "importance_sample_ratio": 0.75,
}
# Default sizes of both kinds.
SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 640,
    "patch_size": 16,
}


_swapped = partial(np.transpose, axes=(2, 3, 0, 1))
depthwise = Transform(_swapped, _swapped)
"""Depthwise convolution (D, 1, 3, 3) <-> (3, 3, D, 1)."""


def transposed_kernel(width: int) -> Transform:
    """Transposed convolution (D, D, 2, 2) <-> (D, 4 D), columns as (row, column, channel)."""
    return Transform(
        lambda x: np.transpose(x, (0, 2, 3, 1)).reshape(width, 4 * width),
        lambda x: np.transpose(x.reshape(width, 2, 2, width), (0, 3, 1, 2)),
    )


def head_rules(width: int) -> list[Rule]:
    """Returns the table of the parts that EoMT adds to a ViT of this width."""
    scale = "upscale_block.block.{i}"
    return [
        Rule("query.weight", "queries/embedding"),
        Rule("attn_mask_probs", "mask_probabilities/attn_mask_probs"),
        Rule(f"{scale}.conv1.weight", "upscale_{i}/kernel", transposed_kernel(width)),
        Rule(f"{scale}.conv1.bias", "upscale_{i}/bias"),
        Rule(f"{scale}.conv2.weight", "upscale_{i}/depthwise_kernel", depthwise),
        *encoder_rules.norms({f"{scale}.layernorm2d": "upscale_{i}/norm"}),
        *encoder_rules.dense({f"mask_head.fc{i + 1}": f"mask_head/dense_{i}" for i in range(3)}),
        *encoder_rules.dense({"class_predictor": "class_logits"}),
    ]


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table: that on DINOv3 if the config has a rotary embedding, else on DINOv2."""
    if config.rope_theta is not None:
        table, names = dinov3.rules(config), {dinov3.BLOCK: BLOCK, "norm.": "layernorm."}
    else:
        # Older versions of transformers store gate and up projection in one tensor.
        gated = dinov2.newer_rules() if config.use_swiglu_ffn else []
        positions = Rule(POSITIONS, "tokens/position_embedding", leading_axes(1))
        table, names = [positions, *gated, *dinov2.rules(config)], RENAMED
    left = {dinov2.MASK, dinov2.POSITIONS}
    renamed = [
        replace(rule, source=reduce(lambda name, x: name.replace(*x), names.items(), rule.source))
        for rule in table
        if rule.source not in left
    ]
    return [*renamed, *head_rules(config.hidden_dim)]


def _read(path: Path, description: dict[str, Any], tensors: Tensors) -> SourceCheckpoint:
    get, turns = description.get, description["model_type"] == KINDS[1]
    shown = dinov3.ungated(path, description) if turns else description
    backbone = huggingface_config.backbone_fields(path, SIZES | shown) | {
        "layer_norm_epsilon": get("layer_norm_eps", 1e-6),
        "drop_path_rate": get("drop_path_rate", 0.0),
        "layer_scale": get("layerscale_value", 1.0),
        "num_register_tokens": get("num_register_tokens", 4),
    }
    if turns:
        backbone |= {
            "use_position_embedding": False,
            "use_swiglu_ffn": get("use_gated_mlp", False),
            **dinov3.turning(path, description),
        }
    else:
        width, ratio = backbone["hidden_dim"], get("mlp_ratio", 4)
        gated = get("use_swiglu_ffn", False)
        backbone |= {
            "position_over_prefix": False,
            "use_swiglu_ffn": gated,
            "mlp_dim": dinov2.gated_dim(width, ratio) if gated else int(width * ratio),
        }
        if gated and backbone["approximate_gelu"]:  # of the heads alone, which transformers has
            raise InputError(
                f"{path}: use_swiglu_ffn with hidden_act {description['hidden_act']!r}; only "
                "'gelu' is supported"
            )
    settings = {name: get(name, usual) for name, usual in SETTINGS.items()}
    if (weight := tensors.pop(CLASS_WEIGHTS, None)) is not None:
        settings["no_object_weight"] = round(float(weight.read()[-1]), 6)
    if REGISTERS in tensors and not tensors[REGISTERS].nbytes:
        del tensors[REGISTERS]
    head = tensors.get("class_predictor.bias")
    labels = huggingface_config.labels(description, tensors, "ForUniversalSegmentation")
    classes = labels if head is None else head.shape[0] - 1
    return checkpoint(
        path,
        backbone,
        task={"num_classes": classes, **settings},
        rules=rules,
        tensors=tensors,
        positions=POSITIONS,
        flat=True,
    )


def describe(config: ViTConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json that other models of transformers have not."""
    kind = KINDS[config.rope_theta is not None]
    return {
        "architectures": [f"{NAMES[kind]}ForUniversalSegmentation"],
        "model_type": kind,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_dropout": config.attention_dropout,
        "drop_path_rate": config.drop_path_rate,
        "layerscale_value": config.layer_scale,
        "num_register_tokens": config.num_register_tokens,
        **{name: settings[name] for name in SETTINGS},
    }


def more_tensors(config: ViTConfig, settings: Mapping[str, Any]) -> dict[str, LazyArray]:
    """Returns tensors that the format has and the model lacks."""
    weights = np.ones(settings["num_classes"] + 1, "float32")
    weights[-1] = settings["no_object_weight"]
    tensors = {CLASS_WEIGHTS: LazyArray(weights.shape, weights.dtype, lambda: weights)}
    if not config.num_register_tokens:
        none = np.zeros((1, 0, config.hidden_dim), "float32")
        tensors[REGISTERS] = LazyArray(none.shape, none.dtype, lambda: none)
    return tensors


FORMAT = ViTFormat(KINDS, _read)
