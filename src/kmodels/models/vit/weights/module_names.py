"""Names of a ViT's linear layers in transformers, under which PEFT keeps adapters.

Each kind has its own. A layer without a name here has none there either: the attention pooling of
SigLIP keeps query, key and value in one tensor, and reads the weight of its output projection
directly, without the adapter that PEFT puts around it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import dinov3, huggingface

if TYPE_CHECKING:
    import keras

Names = Mapping[str, str]

_ATTENTION = ("query", "key", "value", "output")


def _block(prefix: str, projections: Sequence[str], **mlp: str) -> dict[str, str]:
    """Returns names of a block's layers; `prefix` is the name of a block with its number."""
    names = {f"attention/{ours}": x for ours, x in zip(_ATTENTION, projections, strict=True)}
    names |= {f"mlp/{ours}": f"mlp.{theirs}" for ours, theirs in mlp.items()}
    return {f"block_{{i}}/{ours}": prefix + theirs for ours, theirs in names.items()}


# === transformers 5 ===
PROJECTIONS = [f"attention.{name}_proj" for name in "qkvo"]
DINO = "encoder.layer.{i}."
VIT = _block("layers.{i}.", PROJECTIONS, up="fc1", down="fc2") | {"pre_logits": "pooler.dense"}
DINOV2 = _block(DINO, PROJECTIONS, up="fc1", down="fc2")
GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SWIGLU = _block(DINO, PROJECTIONS, **GATED)
DINOV3 = _block("model.layer.{i}.", PROJECTIONS, **GATED)
CLIP = encoder_rules.names()
SIGLIP = CLIP | {
    "pooling/mlp/up": "head.mlp.fc1",
    "pooling/mlp/down": "head.mlp.fc2",
    # Nothing here has this name; it is listed since the projections of its blocks end alike.
    "": "head.attention.out_proj",
}

# === Older names, of transformers 4 ===
OLD = [f"attention.attention.{name}" for name in _ATTENTION[:3]] + ["attention.output.dense"]
OLD_VIT = _block(DINO, OLD) | {
    "block_{i}/mlp/up": f"{DINO}intermediate.dense",
    "block_{i}/mlp/down": f"{DINO}output.dense",
}
OLD_DINOV3 = _block("layer.{i}.", PROJECTIONS, **GATED)
OLD_DINOV2 = _block(DINO, OLD, up="fc1", down="fc2")
# It had gate and up projection in one layer, which is two here.
OLD_SWIGLU = _block(DINO, OLD, down="weights_out")

# For each kind, the prefix of names in a classifier, and the tables.
KINDS: Mapping[str, tuple[str, Sequence[Names]]] = {
    "vit": ("vit.", (VIT, OLD_VIT)),
    "deit": ("deit.", (VIT, OLD_VIT)),
    "ijepa": ("ijepa.", (VIT, OLD_VIT, CLIP)),
    "dinov2": ("dinov2.", (DINOV2, OLD_DINOV2)),
    "dinov2_with_registers": ("dinov2_with_registers.", (DINOV2, OLD_DINOV2)),
    dinov3.KIND: ("", (DINOV3, OLD_DINOV3)),
    "clip": ("vision_model.", (CLIP,)),
    "siglip": ("vision_model.", (SIGLIP,)),
}


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
    config = backbone.config
    prefix, tables = KINDS[kind_of(config)]
    if config.use_swiglu_ffn and tables[0] is DINOV2:
        tables = (SWIGLU, OLD_SWIGLU)
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
