"""timm's `naflexvit_*`, which takes images as rows of patches: safetensors, as in `timm`."""

import re
from dataclasses import replace
from typing import Any

from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import timm
from kmodels.weights import Rule, transpose

# Names inside timm's embedding, and those of the other ViTs.
EMBEDDING = {
    "embeds.proj.weight": "patch_embed.proj.weight",
    "embeds.proj.bias": "patch_embed.proj.bias",
    "embeds.pos_embed": "pos_embed",
    "embeds.cls_token": "cls_token",
    "embeds.reg_token": "reg_token",
}
SUPPORTED: dict[str, tuple[object, ...]] = {
    **timm.SUPPORTED,
    "pos_embed": ("learned", None),
    "pos_embed_ar_preserving": (False, None),
    "pos_embed_antialias": (True, None),
    "pos_embed_align_corners": (False, None),
    "pos_embed_use_grid_sample": (False, None),
    "rope_type": ("", "none", None),
    "embed_proj_type": ("linear", None),
    "embed_norm_layer": (None,),
    "input_norm_layer": (None,),
    "norm_layer": (None,),
    "patchify_channels_last": (True, None),
    "num_kv_heads": (None,),
    "attn_type": ("standard", None),
    "attn_gated": (False, None),
    "swiglu_mlp": (False, None),
    "scale_attn_inner_norm": (False, None),
    "attn_only_layer_scale": (False, None),
    "attn_pool_num_heads": (None,),
}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table: timm's of a ViT, with the kernel of a dense layer for the patches."""
    kernel = "patch_embed.proj.weight"
    table = timm.rules(config)
    return [replace(rule, transform=transpose) if rule.source == kernel else rule for rule in table]


def _fields(file: timm.TimmFile) -> dict[str, Any]:
    names = ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight")
    file.check("a naflexvit with learned positions", names, SUPPORTED)
    tensors, shared = file.tensors, file.fields()
    _, *grid, _ = tensors["pos_embed"].shape
    patch = file.arguments.get("patch_size")
    if not patch:
        named = re.search(r"_patch(\d+)_", file.name)
        patch = int(named[1]) if named else 16
    siglip = "_siglip" in file.name
    mode = file.arguments.get("pos_embed_interp_mode") or ("bilinear" if siglip else "bicubic")
    numbers = tensors["patch_embed.proj.weight"].shape[1]
    return shared | {
        "image_shape": (grid[0] * patch, grid[1] * patch, numbers // patch**2),
        "patch_size": patch,
        "mlp_dim": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        "layer_norm_epsilon": 1e-6,
        "use_mha_bias": any(f"blocks.0.attn.{x}.bias" in tensors for x in ("qkv", "proj")),
        "position_over_prefix": not shared["use_class_token"],
        "position_interpolation": f"{mode}_antialias",
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "approximate_gelu": file.gelu("gelu_tanh" if siglip else "gelu"),
    }


FORMAT = timm.TimmFormat({"naflex"}, _fields, rules, names=EMBEDDING)
