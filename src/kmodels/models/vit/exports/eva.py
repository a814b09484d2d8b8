"""DINOv3 and Perception Encoder as timm writes them: what `exports.timm` says of its ViT."""

from collections.abc import Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import eva

# timm's own names decide what no argument in a file can say: the norms' epsilon, and the kinds of
# attention and of rotary embedding.
DINOV3, PERCEPTION = "vit_small_patch16_dinov3", "vit_pe_core_base_patch16_224"


def describe(
    config: ViTConfig, settings: Mapping[str, Any], pooling: str, poolings: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what config.json has of a ViT with a rotary embedding alone.

    Args:
        config: config of the backbone.
        settings: settings of the task; empty for a backbone.
        pooling: the pooling, by the name here.
        poolings: names here to names there.

    Returns:
        "architecture", and "model_args" without what every ViT of timm has.

    Raises:
        InputError: lists what timm's EVA cannot express.
    """
    centered = config.rope_type == "dinov3"
    # Its attention has no bias of the keys, or all three in one.
    alone = config.use_query_bias and config.use_value_bias and not config.use_key_bias
    without = not (config.use_query_bias or config.use_key_bias or config.use_value_bias)
    mapped = pooling == "map"
    absent = {
        f"token_merging={config.token_merging}": bool(config.token_merging),
        f"layer_norm_epsilon={config.layer_norm_epsilon}": config.layer_norm_epsilon != eva.EPSILON,
        "a mask token": config.use_mask_token,
        "a distillation token": config.use_distillation_token,
        "positions of the class token beside registers": bool(config.num_register_tokens)
        and config.num_special_positions > 0,
        "biases of the patches other than with pre_norm=False": (
            config.use_patch_bias == config.pre_norm
        ),
        "these biases of the attention": not (
            config.use_mha_bias
            and config.use_proj_bias
            and ((alone or without) if centered else not config.unbiased)
        ),
        "use_mlp_bias=False": not config.use_mlp_bias,
        f"approximate_gelu={config.approximate_gelu!r}": bool(config.approximate_gelu),
        "attention pooling without class token and registers": mapped
        and bool(config.num_prefix_tokens)
        and not config.pool_include_prefix,
        "intermediate_dim": bool(settings.get("intermediate_dim")),
        "head_bias=False": bool(settings.get("num_classes"))
        and not settings.get("head_bias", True),
        "an activation": settings.get("activation") not in (None, "linear"),
        f"pooling={pooling!r}": pooling not in poolings,
    }
    if problems := [name for name, there in absent.items() if there]:
        raise InputError(f"timm's EVA has no counterpart for {', '.join(problems)}")
    arguments: dict[str, Any] = {
        "qkv_bias": not without,
        "swiglu_mlp": config.use_swiglu_ffn,
        # One keeps the gate apart from what it multiplies, and rounds no width.
        "swiglu_align_to": 1,
        "num_reg_tokens": config.num_register_tokens,
        "no_embed_class": config.num_special_positions == 0,
        "use_abs_pos_emb": config.use_position_embedding,
        "use_pre_transformer_norm": config.pre_norm,
        "use_post_transformer_norm": config.final_norm,
        "use_fc_norm": settings.get("pooled_norm", False),
        "rope_temperature": config.rope_theta,
        "dynamic_img_size": False,
        **{theirs: getattr(config, ours) for ours, theirs in eva.MOVES.items()},
    }
    if mapped:
        arguments["attn_pool_num_heads"] = config.pooling_num_heads or config.num_heads
        ratio = (config.pooling_mlp_dim or config.mlp_dim) / config.hidden_dim
        arguments["attn_pool_mlp_ratio"] = ratio
    if not centered:
        arguments["rope_grid_offset"] = config.rope_grid_offset
        arguments["ref_feat_shape"] = config.ref_feat_shape
    return {
        "architecture": DINOV3 if centered else PERCEPTION,
        "model_args": arguments,
    }
