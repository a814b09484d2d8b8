"""Hugging Face directories of ViT, DeiT, I-JEPA and MAE: with their heads or decoder, or bare."""

from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks import encoder_rules
from kmodels.models.blocks.encoder_rules import prefix_of
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import huggingface_config
from kmodels.models.vit.weights.huggingface_config import Tensors, ViTFormat, checkpoint
from kmodels.weights import Rule, SourceCheckpoint, patch_kernel

# The prefix of the encoder in a model with a head.
PREFIXES = {"vit": "vit.", "deit": "deit.", "ijepa": "ijepa.", "vit_mae": "vit."}
POSITIONS = "embeddings.position_embeddings"
BLOCK = "encoder.layer.{i}"
# MAE's decoder, and the settings of its task with transformers' defaults.
MAE, DECODER, DECODER_BLOCK = "vit_mae", "decoder.", "decoder_encoder.layer.{i}"
DECODER_SETTINGS = {
    "decoder_hidden_size": 512,
    "decoder_num_hidden_layers": 8,
    "decoder_num_attention_heads": 16,
    "decoder_intermediate_size": 2048,
    "mask_ratio": 0.75,
    "norm_pix_loss": False,
}


def rules(config: ViTConfig, prefix: str = "vit.", distilled: bool = False) -> list[Rule]:
    """Returns the table; `prefix` is one of `PREFIXES` in a larger model and empty in a bare one.

    A DeiT that is distilled has two heads.
    """
    patch = patch_kernel(config.patch_size, config.image_shape[2])
    projection = "embeddings.patch_embeddings.projection"
    table = [
        Rule("embeddings.cls_token", "tokens/class_token"),
        Rule("embeddings.distillation_token", "tokens/distillation_token"),
        Rule(POSITIONS, "tokens/position_embedding"),
        Rule(f"{projection}.weight", "patch_embedding/kernel", patch),
        Rule(f"{projection}.bias", "patch_embedding/bias"),
        *huggingface_config.block_rules(BLOCK, "block_{i}"),
        *encoder_rules.dense({"pooler.dense": "pre_logits"}),
        *encoder_rules.norms({"layernorm": "final_norm"}),
    ]
    heads = {"classifier": "logits"}
    if distilled:
        heads = {"cls_classifier": "logits", "distillation_classifier": "distillation_logits"}
    return [*encoder_rules.prefixed(prefix, table), *encoder_rules.dense(heads)]


def decoder_rules() -> list[Rule]:
    """Returns the table of MAE's decoder."""
    table = [
        Rule("mask_token", "decoder/mask_token"),
        Rule("decoder_pos_embed", "decoder/position_embedding"),
        *encoder_rules.dense(
            {"decoder_embed": "decoder/embed", "decoder_pred": "decoder/prediction"}
        ),
        *huggingface_config.block_rules(DECODER_BLOCK, "decoder/block_{i}"),
        *encoder_rules.norms({"decoder_norm": "decoder/norm"}),
    ]
    return encoder_rules.prefixed(DECODER, table)


def is_ijepa(config: ViTConfig) -> bool:
    """Returns True if a config is one of I-JEPA.

    SigLIP's towers are alike except for the tanh form of GELU, and a model that came from neither
    has timm's rule for its positions.
    """
    return (
        not config.use_class_token
        and config.approximate_gelu is False
        and config.position_interpolation == "bicubic"
    )


def _read(path: Path, description: dict[str, Any], tensors: Tensors) -> SourceCheckpoint:
    kind = description["model_type"]
    backbone = huggingface_config.backbone_fields(path, description) | {
        # The default is that of transformers' configurations.
        "layer_norm_epsilon": description.get("layer_norm_eps", 1e-12),
        "use_distillation_token": kind == "deit",
        "use_class_token": kind != "ijepa",
    }
    tensors = huggingface_config.by_older_names(tensors, huggingface_config.NEWER_BLOCKS)
    decoder, notice = {}, None
    if number := sum(name.startswith(DECODER) for name in tensors):
        notice = f"{DECODER}*, {number} tensors of MAE's pretraining alone, are left out"
    if kind == MAE and (number or not tensors):
        decoder = {name: description.get(name, usual) for name, usual in DECODER_SETTINGS.items()}
    prefix = prefix_of(tensors, PREFIXES[kind])
    sizes = [(prefix + BLOCK, backbone["num_layers"], backbone["hidden_dim"])]
    if decoder:
        layers, width = decoder["decoder_num_hidden_layers"], decoder["decoder_hidden_size"]
        sizes.append((DECODER + DECODER_BLOCK, layers, width))
    for block, layers, width in sizes:
        attention = f"{block}.attention.attention"
        tensors = huggingface_config.with_zero_biases(tensors, attention, layers, width)
    pooler = tensors.get(f"{prefix}pooler.dense.weight")
    if pooler is not None and description.get("pooler_act", "tanh") != "tanh":
        raise InputError(
            f"{path}: pooler_act is {description['pooler_act']!r}; only tanh is supported"
        )
    named = "DeiTForImageClassificationWithTeacher" in (description.get("architectures") or ())
    distilled = "cls_classifier.weight" in tensors if tensors else named
    head = tensors.get("cls_classifier.weight" if distilled else "classifier.weight")
    ending = "ForImageClassificationWithTeacher" if distilled else "ForImageClassification"
    labels = huggingface_config.labels(description, tensors, ending)
    pooling = "gap" if kind == "ijepa" else "token"
    return checkpoint(
        path,
        backbone,
        task={
            "pooling": "distilled" if distilled else pooling,
            "intermediate_dim": pooler.shape[0] if pooler is not None else None,
            "num_classes": head.shape[0] if head is not None else labels,
            **decoder,
        },
        rules=lambda config: [
            *rules(config, prefix, distilled),
            *(decoder_rules() if decoder else ()),
        ],
        tensors=tensors,
        positions=prefix + POSITIONS,
        notice=notice,
        notice_part="decoder/",
    )


FORMAT = ViTFormat(PREFIXES, _read)
