"""timm's `vit_*` and `deit*`: safetensors, alone or in a directory with timm's config.json."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights.huggingface_config import preprocessing
from kmodels.models.vit.weights.resizing import fitting
from kmodels.models.vit.weights.timm_names import LACKING, Architecture, architecture
from kmodels.weights import (
    LazyArray,
    Rule,
    SourceCheckpoint,
    constant,
    patch_kernel,
    read_safetensors,
    transpose,
)
from kmodels.weights.positions import Grid, table_grid

ACTIVATIONS: dict[str, bool | str] = {"gelu": False, "gelu_tanh": True, "quick_gelu": "sigmoid"}
# Fields that only the name or config.json decides, with the values assumed otherwise.
UNTOLD = {"layer_norm_epsilon": 1e-6, "approximate_gelu": False}
log = logging.getLogger("kmodels")
# timm's default of the cropped share of an image.
CROP = 0.875
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
HALF: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: Statistics = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
# timm's names, alone or with the tag behind a dot, for which it has one mean and deviation each.
# The other names, such as vit_base_patch16_224 without its tag, each stand for several trained
# models.
BY_NAME: dict[re.Pattern[str], Statistics] = {
    re.compile(r"deit3?_\w+?(_distilled)?_patch\d+_\d+(\..*)?"): IMAGENET,
    re.compile(r"vit_[a-z]+_patch14_(reg4_)?dinov2(\..*)?"): IMAGENET,
    re.compile(r"vit_\w+_patch\d+_dinov3(_qkvb)?\.lvd1689m"): IMAGENET,
    re.compile(r"vit_\w+_patch16_rope_(ape_)?224(\..*)?"): IMAGENET,
    re.compile(r"vit_(base|mediumd?)_patch16_rope_reg1_gap_256(\..*)?"): HALF,
    re.compile(r"vit_betwixt_patch16_rope_reg4_gap_256(\..*)?"): CLIP,
    re.compile(r"vit_pe_(core|lang|spatial)_\w+_patch\d+_\d+(\..*)?"): HALF,
    re.compile(r"vit_\w+_patch\d+_siglip(_gap)?_\d+(\..*)?"): HALF,
    re.compile(r"vit_\w+_patch\d+(_\d+)?\.augreg\w*"): HALF,
    re.compile(r"naflexvit_\w+_patch\d+_\w+(\..*)?"): HALF,
    re.compile(
        r"vit_(?!large_patch14_clip_)\w+_patch\d+(_plus)?_clip(_quickgelu)?_\d+(\..*)?"
    ): CLIP,
}
UNKNOWN = {
    "pool_include_prefix": (False, None),
    "scale_attn_norm": (False, None),
    "scale_mlp_norm": (False, None),
    "pos_embed": ("learn", None),
    "attn_layer": ("", None),
    "block_fn": ("", None),
    "mlp_layer": ("", None),
    "norm_layer": ("", None),
    "embed_layer": ("", None),
    "embed_norm_layer": ("", None),
}
# As timm says it; DeiT's classifier with two heads calls itself "token".
POOLINGS = {"token": "token", "avg": "gap", "max": "max", "avgmax": "avgmax", "map": "map"}
NORMS = {
    "norm_pre": "pre_norm",
    "norm": "final_norm",
    "fc_norm": "pooled_norm",
    "blocks.{i}.norm1": "block_{i}/attention_norm",
    "blocks.{i}.norm2": "block_{i}/mlp_norm",
    "blocks.{i}.attn.q_norm": "block_{i}/attention/query_norm",
    "blocks.{i}.attn.k_norm": "block_{i}/attention/key_norm",
    "attn_pool.norm": "pooling/mlp_norm",
}
DENSE: dict[str, str | tuple[str, ...]] = {
    "blocks.{i}.attn.qkv": tuple(f"block_{{i}}/attention/{x}" for x in ("query", "key", "value")),
    "blocks.{i}.attn.proj": "block_{i}/attention/output",
    "blocks.{i}.mlp.fc2": "block_{i}/mlp/down",
    "attn_pool.q": "pooling/attention/query",
    "attn_pool.kv": ("pooling/attention/key", "pooling/attention/value"),
    "attn_pool.proj": "pooling/attention/output",
    "attn_pool.mlp.fc1": "pooling/mlp/up",
    "attn_pool.mlp.fc2": "pooling/mlp/down",
    "head": "logits",
    "head_dist": "distillation_logits",
}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table."""
    table = [
        Rule("cls_token", "tokens/class_token"),
        Rule("dist_token", "tokens/distillation_token"),
        Rule("reg_token", "tokens/register_tokens"),
        Rule("pos_embed", "tokens/position_embedding"),
        Rule(
            "patch_embed.proj.weight",
            "patch_embedding/kernel",
            patch_kernel(config.patch_size, config.image_shape[2]),
        ),
        Rule("patch_embed.proj.bias", "patch_embedding/bias"),
        Rule("blocks.{i}.ls1.gamma", "block_{i}/attention_scale/scale"),
        Rule("blocks.{i}.ls2.gamma", "block_{i}/mlp_scale/scale"),
        Rule("attn_pool.latent", "pooling/probe"),
    ]
    up = ("block_{i}/mlp/gate", "block_{i}/mlp/up") if config.use_swiglu_ffn else "block_{i}/mlp/up"
    for source, target in (DENSE | {"blocks.{i}.mlp.fc1": up}).items():
        targets = (target,) if isinstance(target, str) else target
        kernels = [f"{path}/kernel" for path in targets]
        table.append(Rule(f"{source}.weight", kernels, transpose))
        table.append(Rule(f"{source}.bias", [f"{path}/bias" for path in targets]))
    for source, target in NORMS.items():
        table.append(Rule(f"{source}.weight", f"{target}/scale"))
        table.append(Rule(f"{source}.bias", f"{target}/bias"))
    return table


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns True for a safetensors file, or a directory whose config.json names timm's ViT."""
    if not path.is_dir():
        return path.suffix == ".safetensors"
    name = str(description.get("architecture", ""))
    return name in LACKING or bool(re.match(r"(vit|deit|deit3|flexivit|eva_large)_", name))


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
    name = str(description.get("architecture", path.stem))
    known = architecture(path, name)
    tensors = read_safetensors(path)
    if absent := [name for name in ("patch_embed.proj.weight", "pos_embed") if name not in tensors]:
        raise InputError(f"{path} is not a timm ViT: it lacks {', '.join(absent)}")
    arguments = arguments_of(path, name, known, description, given)
    refuse_unknown(path, arguments, UNKNOWN)
    backbone = _backbone(path, arguments, given, description, tensors)
    # The CLIP and BEiT-3 ancestors of some checkpoints normed with PyTorch's own 1e-5.
    backbone |= {} if known is None else {"layer_norm_epsilon": known.epsilon}
    config = ViTConfig(**backbone)
    tensors = with_zero_biases(tensors, config)
    pictures = pictures_of(path, name, description, given, config)
    return SourceCheckpoint(
        path=path,
        kind="timm",
        backbone=backbone,
        task=task_of(path, arguments, tensors),
        **preprocessing(path, pictures),
        tensors=tensors,
        rules=rules(config),
        fit=fitting(config, "pos_embed"),
        assumed=assumed(known, arguments, backbone, tensors),
    )


def arguments_of(
    path: Path,
    name: str,
    known: Architecture | None,
    description: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns timm's arguments of a model: those in config.json, else those of the architecture.

    Args:
        path: for the error.
        name: of the architecture.
        known: the architecture, or None.
        description: the object in config.json; empty for a bare file.
        given: fields of the config that the caller gives.

    Raises:
        InputError: if the number of heads is unknown.
    """
    arguments = dict(description.get("model_args") or {})
    usual = {}
    if known is not None:
        usual = {
            "num_heads": known.num_heads,
            "global_pool": description.get("global_pool") or known.pooling,
            "act_layer": known.activation,
            "no_embed_class": known.no_embed_class,
        }
    found = {**usual, **{key: value for key, value in arguments.items() if value is not None}}
    if (heads := given.get("num_heads") or found.get("num_heads")) is None:
        raise InputError(
            f"{path}: {name!r} is no architecture of timm's, so nothing says how many heads it "
            "has; give num_heads, or name the file after its architecture, such as "
            "vit_base_patch16_224.safetensors"
        )
    if "position_over_prefix" in given:
        found["no_embed_class"] = not given["position_over_prefix"]
    return {"global_pool": description.get("global_pool"), **found, "num_heads": heads}


def assumed(
    known: Architecture | None,
    arguments: Mapping[str, Any],
    backbone: Mapping[str, Any],
    tensors: Mapping[str, LazyArray],
) -> dict[str, Any]:
    """Returns the settings that neither name, nor config.json, nor tensors decide.

    Args:
        known: the architecture, or None.
        arguments: timm's arguments of the model.
        backbone: fields of the config.
        tensors: those of the file.
    """
    if known is not None:
        return {}
    fields = {name: backbone[name] for name in UNTOLD if name in backbone}
    if arguments.get("act_layer"):
        fields.pop("approximate_gelu", None)
    if arguments.get("global_pool") or "attn_pool.latent" in tensors:
        return fields
    return {**fields, "pooling": POOLINGS[_pooling_by_tensors(tensors)]}


def statistics_of(name: str, description: dict[str, Any], channels: int) -> Statistics | None:
    """Returns mean and deviation of the file, or of timm's models of that name."""
    told = description.get("pretrained_cfg", {})
    mean, std = told.get("mean"), told.get("std")
    if mean and std:
        return (tuple(mean), tuple(std)) if len(mean) == len(std) == channels else None
    if tag := description.get("pretrained_cfg", {}).get("tag"):
        name = f"{name}.{tag}"
    found = next((found for names, found in BY_NAME.items() if names.fullmatch(name)), None)
    return found if channels == 3 else None


def refuse_unknown(
    path: Path, arguments: Mapping[str, Any], known: Mapping[str, tuple[object, ...]]
) -> None:
    """Raises `InputError` for an argument whose value the model has no counterpart for.

    Args:
        path: path of the file, for errors.
        arguments: timm's arguments of the model.
        known: values that may stand for each of some arguments.
    """
    for key, values in known.items():
        if key in arguments and arguments[key] not in values:
            raise InputError(f"{path}: {key}={arguments[key]!r} has no counterpart in the model")


def _backbone(
    path: Path,
    arguments: dict[str, Any],
    given: dict[str, Any],
    description: dict[str, Any],
    tensors: Mapping[str, LazyArray],
) -> dict[str, Any]:
    width, channels, patch = patches_of(path, tensors)
    gated = _is_gated(path, arguments, tensors)
    layers = {int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))}
    has_class, distilled = "cls_token" in tensors, "dist_token" in tensors
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    rows = tensors["pos_embed"].shape[1]
    special = int(has_class) + int(distilled)
    shapes = shapes_of(arguments, description, given)
    grid = grid_of(path, shapes, patch, rows, special, registers, arguments)
    return {
        "image_shape": (grid[0] * patch, grid[1] * patch, channels),
        "patch_size": patch,
        "num_layers": len(layers),
        "num_heads": arguments["num_heads"],
        "hidden_dim": width,
        "mlp_dim": _mlp_dim(tensors, width) // (2 if gated else 1),
        "layer_norm_epsilon": UNTOLD["layer_norm_epsilon"],
        "use_patch_bias": "patch_embed.proj.bias" in tensors,
        "use_mha_bias": any(f"blocks.0.attn.{x}.bias" in tensors for x in ("qkv", "proj")),
        "use_mlp_bias": "blocks.0.mlp.fc1.bias" in tensors,
        "use_class_token": has_class,
        "use_distillation_token": distilled,
        "num_register_tokens": registers,
        "position_over_prefix": rows > grid[0] * grid[1] or not has_class,
        "position_interpolation": "bicubic_antialias",
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in tensors else None,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "final_norm": "norm.weight" in tensors,
        "approximate_gelu": gelu_of(path, arguments, gated),
        "use_swiglu_ffn": gated,
    }


def patches_of(path: Path, tensors: Mapping[str, LazyArray]) -> tuple[int, int, int]:
    """Returns the width of the model, its channels and the side of its patches.

    Args:
        path: for the error.
        tensors: those of the file.

    Raises:
        InputError: for patches that are not square.
    """
    shape = tensors["patch_embed.proj.weight"].shape
    if len(shape) != 4 or shape[2] != shape[3]:
        raise InputError(f"{path}: patches of {shape[2:]} pixels; only square ones are supported")
    return shape[0], shape[1], shape[2]


def shapes_of(
    arguments: Mapping[str, Any], description: Mapping[str, Any], given: Mapping[str, Any]
) -> list[Sequence[int]]:
    """Returns the sizes in pixels, (height, width), that the positions may belong to.

    Args:
        arguments: timm's arguments of the model.
        description: the object in config.json; empty for a bare file.
        given: fields of the config that the caller gives.
    """
    size = arguments.get("img_size") or (description.get("pretrained_cfg") or {}).get("input_size")
    sizes: list[Any] = [size[-2:] if isinstance(size, list | tuple) else (size, size)]
    shape = given.get("image_shape")
    return [*(sizes if size else ()), *(() if shape is None else (shape[:2],))]


def grid_of(
    path: Path,
    shapes: Sequence[Sequence[int]],
    patch: int,
    rows: int,
    special: int,
    registers: int,
    arguments: Mapping[str, Any],
) -> Grid:
    """Returns the grid of a table of positions: of an image size that fits it, or a square.

    Args:
        path: for messages.
        shapes: sizes that are told or given; either may be that of another table.
        patch: side of a patch in pixels.
        rows: rows of the table.
        special: class and distillation tokens.
        registers: registers of the model.
        arguments: timm's, of which `no_embed_class` counts if it is there.

    Raises:
        InputError: for a table that covers the registers, or one of no known shape.
    """
    grids = [(height // patch, width // patch) for height, width in shapes]
    told = arguments.get("no_embed_class")
    fronts = (special, 0) if told is None else (0,) if told else (special,)
    try:
        return table_grid(f"{path}: pos_embed", rows, fronts, grids)
    except InputError:
        patches = max(rows - special - registers, 0)
        sizes = {grid[0] * grid[1] for grid in grids} | {math.isqrt(patches) ** 2}
        if not registers or patches not in sizes:
            raise
    raise InputError(
        f"{path}: the positions cover the registers; only no_embed_class=True is supported"
    )


def gelu_of(path: Path, arguments: Mapping[str, Any], gated: bool = False) -> bool | str:
    """Returns the form of GELU that timm's `act_layer` means; a gated MLP has none.

    Args:
        path: for the error.
        arguments: timm's arguments of the model.
        gated: True if the MLP is gated.

    Raises:
        InputError: for another activation.
    """
    activation = arguments.get("act_layer") or "gelu"
    if gated:
        return False
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: act_layer is {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _is_gated(path: Path, arguments: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> bool:
    """Returns True if the first layer of the MLP has twice the inputs of the second.

    Raises:
        InputError: for a gated MLP of another kind than DINOv2's.
    """
    first, second = (tensors.get(f"blocks.0.mlp.fc{x}.weight") for x in (1, 2))
    if first is None or second is None or first.shape[0] != 2 * second.shape[1]:
        return False
    if arguments.get("act_layer") != "silu":
        raise InputError(
            f"{path} has a gated MLP, which is supported only for vit_giant_patch14_dinov2 and "
            "others of that shape; name the file after its architecture"
        )
    return True


def _mlp_dim(tensors: Mapping[str, LazyArray], width: int) -> int:
    found = tensors.get("blocks.0.mlp.fc1.weight")
    return found.shape[0] if found is not None else 4 * width


def pictures_of(
    path: Path,
    name: str,
    description: Mapping[str, Any],
    given: Mapping[str, Any],
    config: ViTConfig,
) -> dict[str, Any] | None:
    """Returns the arguments of a preprocessor; None if mean and deviation are unknown.

    Args:
        path: for messages.
        name: timm's name of the model.
        description: the object in its config.json.
        given: fields of the config that the caller gives.
        config: config of the backbone.
    """
    statistics = statistics_of(name, dict(description), config.image_shape[2])
    if statistics is None:
        return None
    told = description.get("pretrained_cfg") or {}
    height, width = given.get("image_shape", config.image_shape)[:2]
    found: dict[str, Any] = {
        "image_size": (height, width),
        "mean": statistics[0],
        "std": statistics[1],
        "interpolation": told.get("interpolation") or "bicubic",
    }
    if not description:
        log.warning(
            "%s: a file alone does not say timm's crop_pct, so images are stretched; read it with "
            "its config.json, or give a preprocessor with resize_size",
            path,
        )
        return found
    share, mode = told.get("crop_pct") or CROP, told.get("crop_mode") or "center"
    whole = (math.floor(height / share), math.floor(width / share))
    if mode == "border":
        found |= {"resize_size": whole, "rounds_center": True, "resize_mode": "fit"}
    elif mode != "squash" and whole[0] == whole[1]:
        found |= {"resize_size": whole[0], "rounds_center": True}
    elif mode != "squash":
        found |= {"resize_size": whole, "rounds_center": True, "resize_mode": "cover"}
    elif whole != (height, width):
        found |= {"resize_size": whole, "rounds_center": True}
    return found


def task_of(
    path: Path, arguments: Mapping[str, Any], tensors: Mapping[str, LazyArray]
) -> dict[str, Any]:
    """Returns the settings of the task, by the arguments or the tensors.

    Args:
        path: for messages.
        arguments: timm's arguments of the model.
        tensors: those of the file.

    Raises:
        InputError: for a pooling that is not here.
    """
    pooling = arguments.get("global_pool") or _pooling_by_tensors(tensors)
    distilled = pooling == "token" and "dist_token" in tensors
    if pooling not in POOLINGS:
        raise InputError(f"{path}: global_pool is {pooling!r}; known: {', '.join(POOLINGS)}")
    head = tensors.get("head.weight")
    return {
        "num_classes": None if head is None else head.shape[0],
        "pooling": "distilled" if distilled else POOLINGS[pooling],
        "pooled_norm": "fc_norm.weight" in tensors,
    }


def _pooling_by_tensors(tensors: Mapping[str, LazyArray]) -> str:
    if "attn_pool.latent" in tensors:
        return "map"
    return "token" if "cls_token" in tensors and "fc_norm.weight" not in tensors else "avg"


def with_zero_biases(tensors: Mapping[str, LazyArray], config: ViTConfig) -> dict[str, LazyArray]:
    """Adds zeros for the biases that `qkv_bias=False` leaves out; the output projection has one.

    Args:
        tensors: those of a file.
        config: config of the backbone.
    """
    found = dict(tensors)
    for i in range(config.num_layers):
        for part, size in (("qkv", 3), ("proj", 1)):
            name = f"blocks.{i}.attn.{part}"
            absent = f"{name}.weight" in tensors and f"{name}.bias" not in tensors
            if config.use_mha_bias and absent:
                found[f"{name}.bias"] = constant(0.0, (size * config.hidden_dim,))
    return found
