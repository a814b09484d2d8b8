"""Hugging Face directories of DINOv2, with and without registers."""

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

KINDS = ("dinov2", "dinov2_with_registers")
POSITIONS = "embeddings.position_embeddings"
MASK = "embeddings.mask_token"
BLOCK = "encoder.layer.{i}"
# DINOv2's giant stores gate and up projection in one tensor, the gate first.
GATED = ("block_{i}/mlp/gate", "block_{i}/mlp/up")


def rules(config: ViTConfig, prefix: str = "") -> list[Rule]:
    """Returns the table; `prefix` is that of a classifier and empty in a bare model."""
    patch = patch_kernel(config.patch_size, config.image_shape[2])
    projection = "embeddings.patch_embeddings.projection"
    weights_in = f"{BLOCK}.mlp.weights_in"
    table = [
        Rule("embeddings.cls_token", "tokens/class_token"),
        Rule(MASK, "tokens/mask_token", leading_axes(1)),
        Rule("embeddings.register_tokens", "tokens/register_tokens"),
        Rule(POSITIONS, "tokens/position_embedding"),
        Rule(f"{projection}.weight", "patch_embedding/kernel", patch),
        Rule(f"{projection}.bias", "patch_embedding/bias"),
        Rule(f"{BLOCK}.layer_scale1.lambda1", "block_{i}/attention_scale/scale"),
        Rule(f"{BLOCK}.layer_scale2.lambda1", "block_{i}/mlp_scale/scale"),
        Rule(f"{weights_in}.weight", [f"{path}/kernel" for path in GATED], transpose),
        Rule(f"{weights_in}.bias", [f"{path}/bias" for path in GATED]),
        *encoder_rules.dense(
            {
                f"{BLOCK}.attention.attention.query": "block_{i}/attention/query",
                f"{BLOCK}.attention.attention.key": "block_{i}/attention/key",
                f"{BLOCK}.attention.attention.value": "block_{i}/attention/value",
                f"{BLOCK}.attention.output.dense": "block_{i}/attention/output",
                f"{BLOCK}.mlp.{'weights_out' if config.use_swiglu_ffn else 'fc2'}": (
                    "block_{i}/mlp/down"
                ),
            }
        ),
        *encoder_rules.norms(
            {
                f"{BLOCK}.norm1": "block_{i}/attention_norm",
                f"{BLOCK}.norm2": "block_{i}/mlp_norm",
                "layernorm": "final_norm",
            }
        ),
    ]
    if not config.use_swiglu_ffn:
        table += encoder_rules.dense({f"{BLOCK}.mlp.fc1": "block_{i}/mlp/up"})
    return [*encoder_rules.prefixed(prefix, table), *encoder_rules.dense({"classifier": "logits"})]


def newer_rules(prefix: str = "") -> list[Rule]:
    """Returns the rules of gated MLPs as transformers 5 holds them.

    It writes the others unless `save_original_format=False`.
    """
    apart = zip(("gate", "up", "down"), (*GATED, "block_{i}/mlp/down"), strict=True)
    table = encoder_rules.dense({f"{BLOCK}.mlp.{x}_proj": ours for x, ours in apart})
    return encoder_rules.prefixed(prefix, table)


def gated_dim(width: int, ratio: int) -> int:
    """Returns the width of the gate: two thirds of an MLP's, rounded up to a multiple of 8."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


def ratio_of(config: ViTConfig) -> int | None:
    """Returns the multiple of the width, below 17, that gives the MLP of a config, or None."""
    width, gated = config.hidden_dim, config.use_swiglu_ffn
    dims = (gated_dim(width, ratio) if gated else width * ratio for ratio in range(1, 17))
    return next((i for i, dim in enumerate(dims, 1) if dim == config.mlp_dim), None)


def _read(path: Path, description: dict[str, Any], tensors: Tensors) -> SourceCheckpoint:
    kind, get = description["model_type"], description.get
    registers = kind == "dinov2_with_registers"
    tensors = huggingface_config.by_older_names(tensors, huggingface_config.NEWER_ATTENTION)
    prefix = prefix_of(tensors, f"{kind}.")
    mask = f"{prefix}{MASK}" in tensors if tensors else registers or get("use_mask_token", True)
    width, ratio, gated = (
        get("hidden_size", 768),
        get("mlp_ratio", 4),
        get("use_swiglu_ffn", False),
    )
    backbone = huggingface_config.backbone_fields(path, description, 16 if registers else 14) | {
        "mlp_dim": gated_dim(width, ratio) if gated else int(width * ratio),
        "layer_norm_epsilon": get("layer_norm_eps", 1e-6),
        "drop_path_rate": get("drop_path_rate", 0.0),
        "layer_scale": get("layerscale_value", 1.0),
        "num_register_tokens": get("num_register_tokens", 4) if registers else 0,
        "use_mask_token": mask,
        "use_swiglu_ffn": gated,
    }
    if gated:
        backbone["approximate_gelu"] = False
    if registers:
        # Unlike its sibling, this one smooths before it shrinks.
        backbone["position_interpolation"] = "bicubic_antialias"
    attention = f"{prefix}{BLOCK}.attention.attention"
    layers = backbone["num_layers"]
    tensors = huggingface_config.with_zero_biases(tensors, attention, layers, width)
    head = tensors.get("classifier.weight")
    labels = huggingface_config.labels(description, tensors, "ForImageClassification")
    classes = labels if head is None else head.shape[0]
    return checkpoint(
        path,
        backbone,
        task={"pooling": "token" if classes is None else "token_gap", "num_classes": classes},
        rules=lambda config: [*rules(config, prefix), *newer_rules(prefix)],
        tensors=tensors,
        positions=prefix + POSITIONS,
    )


FORMAT = ViTFormat(KINDS, _read)
