"""Names of a ViT's linear layers in transformers, under which PEFT keeps adapters.

Each kind has its own. A layer without a name here has none there either: the attention pooling of
SigLIP keeps query, key and value in one tensor, and reads the weight of its output projection
directly, without the adapter that PEFT puts around it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import dinov2, dinov3, huggingface
from kmodels.weights import Rule

if TYPE_CHECKING:
    import keras

Names = Mapping[str, str]


def _block(prefix: str, **mlp: str) -> dict[str, str]:
    """Returns names in transformers 5; `prefix` is the name of a block with its number."""
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names = {f"attention/{ours}": f"attention.{theirs}" for ours, theirs in parts.items()}
    names |= {f"mlp/{ours}": f"mlp.{theirs}" for ours, theirs in mlp.items()}
    return {f"block_{{i}}/{ours}": prefix + theirs for ours, theirs in names.items()}


DINO = "encoder.layer.{i}."
VIT = _block("layers.{i}.", up="fc1", down="fc2") | {"pre_logits": "pooler.dense"}
DINOV2 = _block(DINO, up="fc1", down="fc2")
SWIGLU = _block(DINO, gate="gate_proj", up="up_proj", down="down_proj")
CLIP = encoder_rules.names()
SIGLIP = CLIP | {
    "pooling/mlp/up": "head.mlp.fc1",
    "pooling/mlp/down": "head.mlp.fc2",
    # Nothing here has this name; it is listed since the projections of its blocks end alike.
    "": "head.attention.out_proj",
}


def _in_files(rules: Sequence[Rule]) -> Names:
    """Returns the names of the layers of blocks in files, which are those of transformers 4.

    DINOv2's SwiGLU has gate and up projection in one layer there, which is two here.
    """
    return {
        rule.target.removesuffix("/kernel"): rule.source.removesuffix(".weight")
        for rule in rules
        if isinstance(rule.target, str)
        and rule.target.startswith("block_")
        and rule.target.endswith("/kernel")
    }


def tables_of(config: ViTConfig) -> tuple[str, list[Names]]:
    """Returns the prefix of names in a classifier, and the tables of names without it."""
    kind = kind_of(config)
    if kind == dinov3.KIND:
        return "", [_in_files(dinov3.rules(config, prefix)) for prefix in (dinov3.DEEPER, "")]
    if kind in ("clip", "siglip"):
        return "vision_model.", [CLIP if kind == "clip" else SIGLIP]
    if kind in dinov2.KINDS:
        newer = SWIGLU if config.use_swiglu_ffn else DINOV2
        return f"{kind}.", [newer, _in_files(dinov2.rules(config))]
    tables = [VIT, _in_files(huggingface.rules(config, ""))]
    return f"{kind}.", [*tables, CLIP] if kind == "ijepa" else tables


def kind_of(config: ViTConfig) -> str:
    """Returns transformers' architecture of a backbone, by its distinguishing settings."""
    if config.layer_scale is not None and not config.use_position_embedding:
        return dinov3.KIND
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_register_tokens else "dinov2"
    if config.pre_norm:
        return "clip"
    if huggingface.is_ijepa(config):
        return "ijepa"
    if not config.use_class_token:
        return "siglip"
    return "deit" if config.use_distillation_token else "vit"


def names(model: "keras.Model") -> Sequence[Names]:
    """See `Backbone.peft_names`."""
    backbone, settings = getattr(model, "backbone", model), getattr(model, "settings", {})
    prefix, tables = tables_of(backbone.config)
    heads = _heads(settings)
    # A classifier's names come first for a classifier, a plain model's for all others.
    prefixes = (prefix, "") if heads else ("", prefix)
    return [
        # A classifier does not use the layers that a plain model has after its blocks.
        {ours: start + x for ours, x in table.items() if start != prefix or "{i}" in ours} | heads
        for start in prefixes
        for table in tables
    ]


def _heads(settings: Mapping[str, Any]) -> dict[str, str]:
    if not settings.get("num_classes"):
        return {}
    if settings["pooling"] == "distilled":
        return {"logits": "cls_classifier", "distillation_logits": "distillation_classifier"}
    return {"logits": "classifier" if settings["head_bias"] else "visual_projection"}
