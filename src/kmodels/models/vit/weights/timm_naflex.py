"""timm's `naflexvit_*`, which takes images as rows of patches: safetensors, as in `timm`."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import timm
from kmodels.models.vit.weights.huggingface_config import preprocessing
from kmodels.models.vit.weights.resizing import fitting
from kmodels.models.vit.weights.timm_names import architecture, form_of
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors, transpose

KERNEL, POSITIONS = "embeds.proj.weight", "embeds.pos_embed"
# Names of the other ViTs, and those inside timm's embedding.
EMBEDDING = {
    "patch_embed.proj.weight": KERNEL,
    "patch_embed.proj.bias": "embeds.proj.bias",
    "pos_embed": POSITIONS,
    "cls_token": "embeds.cls_token",
    "reg_token": "embeds.reg_token",
}
UNKNOWN: dict[str, tuple[object, ...]] = {
    **timm.UNKNOWN,
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
    """Returns the table: timm's of a ViT, with the names of its embedding, and rows of patches."""
    table = []
    for rule in timm.rules(config):
        name = EMBEDDING.get(str(rule.source), rule.source)
        table.append(
            replace(rule, source=name, transform=transpose if name == KERNEL else rule.transform)
        )
    return table


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns True if the architecture or the file name is a `naflexvit_*`."""
    if not path.is_dir() and path.suffix != ".safetensors":
        return False
    name = str(description.get("architecture", "" if path.is_dir() else path.stem))
    return form_of(name) == "naflex"


def open_checkpoint(
    path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
) -> SourceCheckpoint:
    """Understands a file or directory; most of the architecture is read off the shapes.

    Args:
        path: path of the file or directory.
        description: the object in its config.json; empty for a bare file.
        given: fields of the config that the user gives; the number of heads may be needed.
        weights: unused; the shapes in the file are needed for the architecture, too.

    Raises:
        InputError: for variants that the model has no counterpart for.
    """
    tensors = dict(read_safetensors(path))
    name = str(description.get("architecture", path.stem))
    known = architecture(path, name)
    arguments = timm.arguments_of(path, name, known, description, given)
    timm.refuse_unknown(path, arguments, UNKNOWN)
    if absent := [x for x in (KERNEL, POSITIONS, "blocks.0.attn.qkv.weight") if x not in tensors]:
        raise InputError(
            f"{path} is not a naflexvit with learned positions: it lacks {', '.join(absent)}"
        )
    _, *grid, width = tensors[POSITIONS].shape
    rows = tensors[POSITIONS].map((1, math.prod(grid), width), lambda x: x.reshape(1, -1, width))
    tensors[POSITIONS] = rows
    backbone = _backbone(path, name, arguments, description, tensors, tuple(grid))
    config = ViTConfig(**backbone)
    pictures = timm.pictures_of(path, name, description, given, config)
    named = {ours: tensors[theirs] for ours, theirs in EMBEDDING.items() if theirs in tensors}
    return SourceCheckpoint(
        path=path,
        kind="timm",
        backbone=backbone,
        task=timm.task_of(path, arguments, {**tensors, **named}),
        **preprocessing(path, pictures),
        tensors=timm.with_zero_biases(tensors, config),
        rules=rules(config),
        fit=fitting(config, POSITIONS),
        assumed=timm.assumed(known, arguments, backbone, {**tensors, **named}),
    )


def _backbone(
    path: Path,
    name: str,
    arguments: Mapping[str, Any],
    description: Mapping[str, Any],
    tensors: Mapping[str, LazyArray],
    grid: tuple[int, ...],
) -> dict[str, Any]:
    width, numbers = tensors[KERNEL].shape
    patch = arguments.get("patch_size") or int(_patch_of(name))
    siglip = "_siglip" in name
    arguments = {"act_layer": "gelu_tanh" if siglip else "gelu", **arguments}
    mode = arguments.get("pos_embed_interp_mode") or ("bilinear" if siglip else "bicubic")
    layers = {int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))}
    registers = tensors.get("embeds.reg_token")
    return {
        "image_shape": (grid[0] * patch, grid[1] * patch, numbers // patch**2),
        "patch_size": patch,
        "num_layers": len(layers),
        "num_heads": arguments["num_heads"],
        "hidden_dim": width,
        "mlp_dim": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        "layer_norm_epsilon": 1e-6,
        "use_patch_bias": "embeds.proj.bias" in tensors,
        "use_mha_bias": any(f"blocks.0.attn.{x}.bias" in tensors for x in ("qkv", "proj")),
        "use_class_token": "embeds.cls_token" in tensors,
        "num_register_tokens": 0 if registers is None else registers.shape[1],
        "position_over_prefix": "embeds.cls_token" not in tensors,
        "position_interpolation": f"{mode}_antialias",
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "final_norm": "norm.weight" in tensors,
        "approximate_gelu": timm.gelu_of(path, arguments),
    }


def _patch_of(name: str) -> str:
    found = re.search(r"_patch(\d+)_", name)
    return found[1] if found else "16"
