"""A ViT as timm writes it: a directory for `timm.create_model("local-dir:<directory>")`."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory
from kmodels.core.remote import staged
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import eva as weights
from kmodels.models.vit.weights import timm
from kmodels.weights import LazyArray, constant, export, write_safetensors
from kmodels.weights.native import refuse_to_replace

log = logging.getLogger("kmodels")

FILES = ("config.json", "model.safetensors")
GELUS = {False: "gelu", True: "gelu_tanh", "sigmoid": "quick_gelu"}
POOLINGS = {pooling: name for name, pooling in timm.POOLINGS.items()}
POOLINGS["distilled"] = "token"
# timm's own names decide these, which no argument in a file can say: a second token, the gated MLP,
# and the norms' epsilon.
PLAIN, DISTILLED = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
GATED, CLIP = "vit_giant_patch14_dinov2", "vit_base_patch32_clip_224"


def _lacking(config: ViTConfig, settings: Mapping[str, Any], pooling: str) -> dict[str, bool]:
    """Returns the settings that no model of timm has, and whether they are in use."""
    return {
        f"token_merging={config.token_merging}": bool(config.token_merging),
        "a mask token": config.use_mask_token,
        "biases of the patches other than with pre_norm=False": (
            config.use_patch_bias == config.pre_norm
        ),
        "intermediate_dim": bool(settings.get("intermediate_dim")),
        "head_bias=False": bool(settings.get("num_classes"))
        and not settings.get("head_bias", True),
        "an activation": settings.get("activation") not in (None, "linear"),
        f"pooling={pooling!r}": pooling not in POOLINGS,
    }


def _eva(
    config: ViTConfig, settings: Mapping[str, Any], pooling: str
) -> tuple[str, dict[str, Any]]:
    """Returns the architecture for a ViT with a rotary embedding, and the arguments of no other."""
    known = [x for x in weights.ROTARY.values() if x.rope_type == config.rope_type]
    rotary = next((x for x in known if x.epsilon == config.layer_norm_epsilon), known[0])
    centered = config.rope_type == "dinov3"
    # Its attention has no bias of the keys, or all three in one.
    alone = config.use_query_bias and config.use_value_bias and not config.use_key_bias
    without = not (config.use_query_bias or config.use_key_bias or config.use_value_bias)
    mapped = pooling == "map"
    absent = {
        **_lacking(config, settings, pooling),
        f"layer_norm_epsilon={config.layer_norm_epsilon}": config.layer_norm_epsilon
        != rotary.epsilon,
        "a distillation token": config.use_distillation_token,
        "positions of the class token beside registers": bool(config.num_register_tokens)
        and config.num_special_positions > 0,
        "these biases of the attention": not (
            config.use_mha_bias
            and config.use_proj_bias
            and (not config.unbiased if rotary.whole_bias else alone or without)
        ),
        "use_mlp_bias=False": not config.use_mlp_bias,
        f"approximate_gelu={config.approximate_gelu!r}": bool(config.approximate_gelu),
        "attention pooling without class token and registers": mapped
        and bool(config.num_prefix_tokens)
        and not config.pool_include_prefix,
    }
    if problems := [name for name, there in absent.items() if there]:
        raise InputError(f"timm's EVA has no counterpart for {', '.join(problems)}")
    arguments: dict[str, Any] = {
        "qkv_bias": not without,
        "swiglu_mlp": config.use_swiglu_ffn,
        # With 1, timm stores gate and up projection apart, and does not round their width.
        "swiglu_align_to": 1,
        "num_reg_tokens": config.num_register_tokens,
        "no_embed_class": config.num_special_positions == 0,
        "use_abs_pos_emb": config.use_position_embedding,
        "use_pre_transformer_norm": config.pre_norm,
        "use_post_transformer_norm": config.final_norm,
        "use_fc_norm": settings.get("pooled_norm", False),
        "rope_temperature": config.rope_theta,
        "dynamic_img_size": False,
        **{theirs: getattr(config, ours) for ours, theirs in weights.MOVES.items()},
    }
    if mapped:
        arguments["attn_pool_num_heads"] = config.pooling_num_heads or config.num_heads
        ratio = (config.pooling_mlp_dim or config.mlp_dim) / config.hidden_dim
        arguments["attn_pool_mlp_ratio"] = ratio
    if not centered:
        arguments["rope_grid_offset"] = config.rope_grid_offset
        arguments["ref_feat_shape"] = config.ref_feat_shape
    return rotary.architecture, arguments


def export_to_timm(model: keras.Model, directory: str | Path) -> Path:
    """Implements `ViTBackbone.export_to_timm`.

    Raises:
        InputError: lists settings that timm's ViT lacks, or files that would be lost.
    """
    backbone = getattr(model, "backbone", model)
    config, settings = backbone.config, getattr(model, "settings", {})
    described = _describe(config, settings)
    rules = timm.rules if config.rope_theta is None else weights.rules
    tensors = export(model, rules(config))
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is not None:
        preprocessor.check_plain("timm's data config")
        described["pretrained_cfg"] |= {
            "mean": list(preprocessor.mean),
            "std": list(preprocessor.std),
            "interpolation": preprocessor.interpolation,
            **_crop(preprocessor),
        }
    with staged(directory) as (target, finish):
        refuse_to_replace(target, FILES)
        with atomic_directory(target) as folder:
            text = json.dumps(described, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
            if config.rope_theta is None:
                tensors = {**tensors, **_zeros(config, tensors)}
            write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return finish(target)


def _crop(preprocessor: Any) -> dict[str, Any]:
    """Returns how timm cuts the middle of an image out.

    Raises:
        InputError: for a size before the crop that no share of timm gives.
    """
    height, width = preprocessor.image_size
    whole, mode = preprocessor.resize_size, preprocessor.resize_mode
    if mode in ("crop", "none"):
        raise InputError(f"timm has no counterpart for resize_mode={mode!r}; give 'stretch'")
    if whole is None:
        return {"crop_pct": 1.0, "crop_mode": "squash"}
    if not preprocessor.rounds_center:
        log.warning(
            "timm cuts the middle of an image out one pixel further right or down than "
            "transformers where half a pixel is left; give rounds_center=True for what it gives"
        )
    # A little less than the quotients, so that timm's division does not end below the size.
    sides = (whole, whole) if isinstance(whole, int) else whole
    share = min(height / (sides[0] + 1e-4), width / (sides[1] + 1e-4))
    fits = [math.floor(side / share) for side in (height, width)] == list(sides)
    # Of a square timm takes the shorter side, rounded in another way.
    one = isinstance(whole, int) or (mode == "cover" and sides[0] == sides[1])
    if not fits or one is not (isinstance(whole, int) and height == width):
        raise InputError(
            f"timm has no counterpart for resize_size={whole} with image_size "
            f"{preprocessor.image_size}; give both sides in one ratio, and one number for a square"
        )
    modes = {"cover": "center", "fit": "border"}
    usual = "center" if isinstance(whole, int) else "squash"
    return {"crop_pct": share, "crop_mode": modes.get(mode, usual)}


def _describe(config: ViTConfig, settings: dict[str, Any]) -> dict[str, Any]:
    pooling, classes = settings.get("pooling"), settings.get("num_classes", 0)
    pooling = pooling or ("token" if config.use_class_token else "gap")
    describe = _vit if config.rope_theta is None else _eva
    architecture, own = describe(config, settings, pooling)
    packed = config.use_swiglu_ffn and config.rope_theta is None
    width, channels = config.hidden_dim, config.image_shape[2]
    arguments: dict[str, Any] = {
        "img_size": list(config.image_shape[:2]),
        "patch_size": config.patch_size,
        "in_chans": channels,
        "embed_dim": width,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        "mlp_ratio": _ratio(config.mlp_dim * (2 if packed else 1), width),
        "qk_norm": config.qk_norm,
        "init_values": config.layer_scale,
        "class_token": config.use_class_token,
        "global_pool": POOLINGS[pooling],
        "drop_rate": settings.get("dropout", 0.0),
        "proj_drop_rate": config.dropout_rate,
        "pos_drop_rate": config.dropout_rate,
        "attn_drop_rate": config.attention_dropout,
        "drop_path_rate": config.drop_path_rate,
        **({"patch_drop_rate": config.patch_drop_rate} if config.patch_drop_rate else {}),
        **own,
    }
    return {
        "architecture": architecture,
        "num_classes": classes,
        **({"label_names": names} if (names := settings.get("class_names")) else {}),
        "num_features": width,
        "global_pool": POOLINGS[pooling],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [channels, *config.image_shape[:2]],
            "num_classes": classes,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if config.use_distillation_token else "head",
        },
    }


def _vit(
    config: ViTConfig, settings: Mapping[str, Any], pooling: str
) -> tuple[str, dict[str, Any]]:
    """Returns the architecture of a `vit_*`, and the arguments that no other has."""
    name = DISTILLED if config.use_distillation_token else PLAIN
    name = GATED if config.use_swiglu_ffn else name
    if config.layer_norm_epsilon == 1e-5 and name == PLAIN:
        name = CLIP
    over = config.position_over_prefix and config.use_class_token
    absent = {
        **_lacking(config, settings, pooling),
        f"layer_norm_epsilon={config.layer_norm_epsilon}": (
            config.layer_norm_epsilon != (1e-5 if name == CLIP else 1e-6)
        ),
        "use_position_embedding=False": not config.use_position_embedding,
        "biases of some projections of the attention alone": config.use_mha_bias
        and bool(config.unbiased),
        "an attention pooling of its own sizes": config.pool_include_prefix
        or bool(config.pooling_num_heads or config.pooling_mlp_dim),
        "registers beside positions of the class token": bool(config.num_register_tokens) and over,
        "a distillation token beside SwiGLU": config.use_distillation_token and name == GATED,
        "logits of the class token alone": config.use_distillation_token and pooling == "token",
        "biases of some linear layers alone": not config.use_mlp_bias,
        "norms before and after pooling": config.final_norm and settings.get("pooled_norm", False),
    }
    if problems := [name for name, there in absent.items() if there]:
        raise InputError(f"timm's ViT has no counterpart for {', '.join(problems)}")
    arguments: dict[str, Any] = {
        "qkv_bias": config.use_mha_bias,
        "no_embed_class": not over,
        "reg_tokens": config.num_register_tokens,
        "pre_norm": config.pre_norm,
        "final_norm": config.final_norm or settings.get("pooled_norm", False),
        "fc_norm": settings.get("pooled_norm", False),
    }
    if not config.use_swiglu_ffn:
        arguments["act_layer"] = GELUS[config.approximate_gelu]
    if config.use_distillation_token:
        arguments.pop("fc_norm")  # its head has no norm of its own to choose
    return name, arguments


def _ratio(dim: int, width: int) -> float:
    """Returns a ratio for which int(ratio * width) is `dim`."""
    ratio = dim / width
    return ratio if int(width * ratio) == dim else (dim + 0.5) / width


def _zeros(config: ViTConfig, tensors: dict[str, LazyArray]) -> dict[str, LazyArray]:
    """Returns zeros for the bias of the output projection, which timm has with `qkv_bias=False`."""
    names = [f"blocks.{i}.attn.proj.bias" for i in range(config.num_layers)]
    return {name: constant(0.0, (config.hidden_dim,)) for name in names if name not in tensors}
