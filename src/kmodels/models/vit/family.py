"""The description of the family that the loaders use."""

from typing import Any

from kmodels.models.blocks.sizes import encoder
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.detection import ViTObjectDetector
from kmodels.models.vit.mae import ViTMAEForPreTraining
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.preprocessor import fit_crop
from kmodels.models.vit.presets import PRESETS
from kmodels.models.vit.segmentation.eomt import EoMTImageSegmenter
from kmodels.models.vit.segmentation.segmenter import ViTImageSegmenter
from kmodels.models.vit.weights import (
    augreg,
    clip_siglip,
    dinov2,
    dinov3,
    eomt,
    eva,
    huggingface,
    timm,
)
from kmodels.models.vit.weights.huggingface_export import transformers_form
from kmodels.models.vit.weights.keras_hub import PEERS
from kmodels.models.vit.weights.resizing import adapt_rules, adapt_statistics, fitting
from kmodels.registry import Family

HEADS = ("logits/", "distillation_logits/")
SIZES_OF_DECODER = (
    *("decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads"),
    "decoder_intermediate_size",
)
OF_DETECTOR = ("memory/", "object_queries/", "decoder_", "object_logits/", "box_head/")
# Of EoMT's settings each decides some variables.
OF_QUERIES = {
    "num_queries": ("queries/", "object_queries/", "box_head/reference"),
    "num_blocks": ("mask_probabilities/attn_mask_probs",),
    "annealing_steps": ("mask_probabilities/step",),
    "num_upscale_blocks": ("upscale_", "mask_head/"),
}


def _defaults(config: ViTConfig, task: dict[str, Any]) -> dict[str, Any]:
    """Returns a classifier's default settings: 1,000 classes, a pooling that the model supports."""
    pooling = "token" if config.use_class_token else "gap"
    return {"num_classes": 1000, "pooling": pooling, **task}


def _fit_preprocessor(settings: dict[str, Any], config: ViTConfig) -> dict[str, Any]:
    *size, channels = config.image_shape
    changed = {
        name: adapt_statistics(settings[name], channels)
        for name in ("mean", "std")
        if len(settings.get(name, ())) not in (0, channels)
    }
    return fit_crop({**settings, **changed}, size)


FAMILY = Family(
    name="vit",
    backbone=ViTBackbone,
    tasks=(
        *(ViTImageClassifier, ViTImageSegmenter, EoMTImageSegmenter, ViTObjectDetector),
        ViTMAEForPreTraining,
    ),
    presets=PRESETS,
    formats=(
        *(one.FORMAT for one in (huggingface, dinov2, dinov3, eomt, clip_siglip)),
        *(eva.FORMAT, timm.NAFLEX, timm.FORMAT, augreg),
    ),
    # The variables that a setting of the task decides: if it is changed, these weights are new.
    parts={
        "num_classes": (*HEADS, "pixel_logits/", "class_logits/", "object_logits/"),
        "head_bias": HEADS,
        "pooling": ("pooling/", "distillation_logits/"),
        "pooled_norm": ("pooled_norm/",),
        "intermediate_dim": ("pre_logits/", *HEADS),
        # A classifier does not read these, nor a segmenter those of a classifier.
        "use_batch_norm": ("batch_norm/", "pixel_logits/"),
        **dict.fromkeys(SIZES_OF_DECODER, ("decoder/",)),
        **OF_QUERIES,
        **dict.fromkeys(("num_decoder_layers", "decoder_dim", "decoder_mlp_dim"), OF_DETECTOR),
    },
    new_where_absent=frozenset({"use_batch_norm", *SIZES_OF_DECODER, *OF_QUERIES, "decoder_dim"}),
    defaults=_defaults,
    fit_preprocessor=_fit_preprocessor,
    fit=lambda tensors, stored, wanted: fitting(stored, "tokens/position_embedding")(
        tensors, wanted
    ),
    fit_rules=adapt_rules,
    sizes=lambda config: encoder(config, tokens=config.num_tokens),
    transformers_form=transformers_form,
    keras_hub=PEERS,
)
