"""Traits that not every ViT has, for packages that cannot express all of them."""

from collections.abc import Mapping, Set
from typing import Any

from kmodels.models.vit.config import ViTConfig

Settings = Mapping[str, Any]
BIAS, UNBIASED = "a bias of the patches", "biases of some projections of the attention alone"
ROTARY = "a rotary embedding"
NONE, LOGITS, PROJECTION = "no head", "logits", "logits without bias"


def lacking(
    config: ViTConfig,
    settings: Settings,
    known: Set[str],
    heads: Set[tuple[str | None, str]],
) -> list[str]:
    """Returns what a model has that another package's cannot express.

    Args:
        config: config of the backbone.
        settings: settings of the task; empty for a backbone.
        known: what is unusual in the original ViT and may be there.
        heads: the pairs of pooling and head that the other has.
    """
    found = [name for name in unusual(config, settings) if name not in known]
    pooling, last = settings.get("pooling"), head(settings)
    if (pooling, last) in heads or not settings:
        return found
    pooled = pooling in {known for known, _ in heads}
    return [*found, f"{last} over pooling={pooling!r}" if pooled else f"pooling={pooling!r}"]


def unusual(config: ViTConfig, settings: Settings) -> list[str]:
    """Returns what a model has that not every ViT has, in the order of a model."""
    native = config.position_interpolation == "bilinear_antialias"
    found = {
        "use_class_token=False": not config.use_class_token,
        "a distillation token": config.use_distillation_token,
        "register tokens": bool(config.num_register_tokens),
        "a mask token": config.use_mask_token,
        "position_over_prefix=False": (
            config.use_class_token
            and config.use_position_embedding
            and not config.position_over_prefix
        ),
        "use_position_embedding=False": not config.use_position_embedding,
        ROTARY: config.rope_theta is not None and config.rope_type == "dinov3",
        f"rope_type={config.rope_type!r}": config.rope_theta is not None
        and config.rope_type != "dinov3",
        UNBIASED: config.use_mha_bias and bool(config.unbiased),
        "an attention pooling of its own sizes": settings.get("pooling") == "map"
        and (
            config.pool_include_prefix
            or config.pooling_num_heads not in (None, config.num_heads)
            or config.pooling_mlp_dim not in (None, config.mlp_dim)
        ),
        "positions of native aspect ratio": native and not config.use_class_token,
        f"token_merging={config.token_merging}": bool(config.token_merging),
        "layer_scale": config.layer_scale is not None,
        "qk_norm": config.qk_norm,
        "pre_norm": config.pre_norm,
        BIAS: config.use_patch_bias,
        "SwiGLU": config.use_swiglu_ffn,
        "final_norm=False": not config.final_norm,
        "pooled_norm": bool(settings.get("pooled_norm")),
        "intermediate_dim": _pooler(config, settings) is False,
        "a pooler": _pooler(config, settings) is True,
        "an activation": settings.get("activation") not in (None, "linear"),
    }
    return [name for name, there in found.items() if there]


def _pooler(config: ViTConfig, settings: Settings) -> bool | None:
    """Returns whether the pre-logits are a bare model's in transformers; None without any."""
    if (dim := settings.get("intermediate_dim")) is None:
        return None
    return not settings["num_classes"] and dim == config.hidden_dim


def head(settings: Settings) -> str:
    """Returns which of `NONE`, `LOGITS` and `PROJECTION` a task has."""
    if not settings.get("num_classes"):
        return NONE
    return LOGITS if settings.get("head_bias", True) else PROJECTION
