"""timm's `Eva` with a rotary embedding (DINOv3, Perception Encoder, RoPE-ViT), as in `timm`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kmodels.core.errors import InputError
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import timm
from kmodels.models.vit.weights.huggingface_config import preprocessing
from kmodels.models.vit.weights.resizing import fitting
from kmodels.models.vit.weights.timm_names import architecture, form_of
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors, transpose
from kmodels.weights.positions import Grid

# Heads of Perception Encoder's pooling, and the side of DINOv3's images in pixels: the usual ones,
# which neither tensors nor names tell.
POOLING_HEADS, SIDE = 8, 256


class Rotary(NamedTuple):
    """Settings that timm's names decide.

    Args:
        architecture: the name under which a model of this form is written.
        rope_type: as in `ViTConfig`.
        theta: the usual base.
        epsilon: epsilon of the norms.
        whole_bias: query, key and value have one bias together; else keys have none.
        reference: (rows, columns) of the images in the name scale the angles of all images.
    """

    architecture: str
    rope_type: str
    theta: float
    epsilon: float
    whole_bias: bool
    reference: bool


ROTARY = {
    "dinov3": Rotary("vit_small_patch16_dinov3", "dinov3", 100.0, 1e-5, False, False),
    "perception": Rotary("vit_pe_core_base_patch16_224", "cat", 10_000.0, 1e-5, True, True),
    "rope_xy": Rotary("vit_small_patch16_rope_224", "cat", 100.0, 1e-6, True, False),
    "rope_ij": Rotary("vit_base_patch16_rope_reg1_gap_256", "cat_ij", 10_000.0, 1e-6, False, True),
}
# (rope_type, rope_grid_indexing, rope_rotate_half) of timm.
THEIR_TYPES = {
    "dinov3": ("dinov3", None, True),
    "cat": ("cat", "xy", False),
    "cat_ij": ("cat", "ij", False),
}
MOVES = {
    "pos_embed_shift": "rope_shift_coords",
    "pos_embed_jitter": "rope_jitter_coords",
    "pos_embed_rescale": "rope_rescale_coords",
}
UNKNOWN: dict[str, tuple[object, ...]] = {
    "num_kv_heads": (None,),
    "attn_only_layer_scale": (False, None),
    "scale_mlp": (False, None),
    "scale_attn_inner": (False, None),
    "use_post_norm": (False, None),
}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table: that of timm's ViT with EVA's names."""
    scales = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    found = []
    for rule in timm.rules(config):
        name = rule.source.removeprefix("blocks.{i}.")
        if name in scales:
            found.append(Rule("blocks.{i}." + scales[name], rule.target))
        elif not name.startswith("mlp.fc1") and (name != "attn.qkv.bias" or config.use_key_bias):
            found.append(rule)
    if not config.use_key_bias:
        found.append(Rule("blocks.{i}.attn.q_bias", "block_{i}/attention/query/bias"))
        found.append(Rule("blocks.{i}.attn.v_bias", "block_{i}/attention/value/bias"))
    first = {"fc1_g": "gate", "fc1_x": "up"} if config.use_swiglu_ffn else {"fc1": "up"}
    for source, target in first.items():
        found.append(
            Rule(f"blocks.{{i}}.mlp.{source}.weight", f"block_{{i}}/mlp/{target}/kernel", transpose)
        )
        found.append(Rule(f"blocks.{{i}}.mlp.{source}.bias", f"block_{{i}}/mlp/{target}/bias"))
    return found


def matches(path: Path, description: dict[str, Any]) -> bool:
    """Returns True if the architecture or the file name is one of `ROTARY`'s forms."""
    if not path.is_dir() and path.suffix != ".safetensors":
        return False
    name = str(description.get("architecture", "" if path.is_dir() else path.stem))
    return form_of(name) in ROTARY


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
    tensors = read_safetensors(path)
    needed = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
    if absent := [name for name in needed if name not in tensors]:
        raise InputError(f"{path} is not one of timm's EVAs: it lacks {', '.join(absent)}")
    name = str(description.get("architecture", path.stem))
    known = architecture(path, name)
    arguments = timm.arguments_of(path, name, known, description, given)
    kind, indexing, half = THEIR_TYPES[ROTARY[form_of(name)].rope_type]
    rotary = {"rope_type": (kind, None), "rope_rotate_half": (half, None)}
    if indexing is not None:
        rotary["rope_grid_indexing"] = (indexing, None)
    timm.refuse_unknown(path, arguments, UNKNOWN | rotary)
    backbone = _backbone(path, name, arguments, given, description, tensors)
    config = ViTConfig(**backbone)
    pictures = timm.pictures_of(path, name, description, given, config)
    return SourceCheckpoint(
        path=path,
        kind="timm",
        backbone=backbone,
        task=timm.task_of(path, arguments, tensors),
        **preprocessing(path, pictures),
        tensors=tensors,
        rules=rules(config),
        fit=fitting(config, "pos_embed"),
        assumed=timm.assumed(known, arguments, {}, tensors),
    )


def _backbone(
    path: Path,
    name: str,
    arguments: dict[str, Any],
    given: dict[str, Any],
    description: dict[str, Any],
    tensors: Mapping[str, LazyArray],
) -> dict[str, Any]:
    width, channels, patch = timm.patches_of(path, tensors)
    layers = {int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))}
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    has_class = "cls_token" in tensors
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    shapes = timm.shapes_of(arguments, description, given)
    numbers = re.search(r"_patch(\d+)_.*?(\d+)$", name.partition(".")[0])
    named = (int(numbers[1]), int(numbers[2])) if numbers else (patch, SIDE)
    grid, over = _grid(path, patch, shapes or [(named[1], named[1])], arguments, tensors)
    reference = (named[1] // named[0], named[1] // named[0])
    first = tensors[f"blocks.0.mlp.{'fc1_g' if gated else 'fc1'}.weight"]
    pooling = tensors.get("attn_pool.mlp.fc1.weight")
    return {
        "image_shape": (grid[0] * patch, grid[1] * patch, channels),
        "patch_size": patch,
        "num_layers": len(layers),
        "num_heads": arguments["num_heads"],
        "hidden_dim": width,
        "mlp_dim": first.shape[0],
        "layer_norm_epsilon": ROTARY[form_of(name)].epsilon,
        "use_patch_bias": "patch_embed.proj.bias" in tensors,
        "use_query_bias": _has_bias(tensors, "q_bias"),
        "use_key_bias": _has_bias(tensors),
        "use_value_bias": _has_bias(tensors, "v_bias"),
        "use_class_token": has_class,
        "num_register_tokens": registers,
        "use_position_embedding": "pos_embed" in tensors,
        "position_over_prefix": over or not has_class,
        "layer_scale": 1.0 if "blocks.0.gamma_1" in tensors else None,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "pre_norm": "norm_pre.weight" in tensors,
        "final_norm": "norm.weight" in tensors,
        "use_swiglu_ffn": gated,
        **_rotary(form_of(name), arguments, has_class, reference),
        **(
            {
                "pooling_num_heads": arguments.get("attn_pool_num_heads") or POOLING_HEADS,
                "pooling_mlp_dim": pooling.shape[0],
                "pool_include_prefix": True,
            }
            if pooling is not None
            else {}
        ),
    }


def _has_bias(tensors: Mapping[str, LazyArray], alone: str = "qkv.bias") -> bool:
    return any(f"blocks.0.attn.{name}" in tensors for name in (alone, "qkv.bias"))


def _rotary(
    form: str, arguments: dict[str, Any], has_class: bool, reference: Grid
) -> dict[str, Any]:
    """Returns the rotary embedding: settings of the file, or else of the form."""
    get, rotary = arguments.get, ROTARY[form]
    shape = get("ref_feat_shape", reference if rotary.reference else None)
    offset = 1.0 if form == "perception" and has_class else 0.0
    return {
        "rope_theta": float(get("rope_temperature", rotary.theta)),
        "rope_type": rotary.rope_type,
        "rope_grid_offset": float(get("rope_grid_offset", offset)),
        "ref_feat_shape": (shape, shape) if isinstance(shape, int) else shape,
        **{ours: get(theirs) for ours, theirs in MOVES.items()},
    }


def _grid(
    path: Path,
    patch: int,
    shapes: Sequence[Sequence[int]],
    arguments: Mapping[str, Any],
    tensors: Mapping[str, LazyArray],
) -> tuple[Grid, bool]:
    """Returns the grid, and whether the positions have rows for the class token."""
    if (table := tensors.get("pos_embed")) is None:
        height, width = shapes[0]
        return (height // patch, width // patch), True
    special = int("cls_token" in tensors)
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    rows = table.shape[1]
    grid = timm.grid_of(path, shapes, patch, rows, special, registers, arguments)
    return grid, rows > grid[0] * grid[1]
