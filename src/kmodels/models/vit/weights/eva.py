"""timm's `Eva` with a rotary embedding (DINOv3, Perception Encoder, RoPE-ViT), as in `timm`."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import timm
from kmodels.models.vit.weights.timm_names import form_of
from kmodels.weights import LazyArray, Rule

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
SUPPORTED: dict[str, tuple[object, ...]] = {
    "num_kv_heads": (None,),
    "attn_only_layer_scale": (False, None),
    "scale_mlp": (False, None),
    "scale_attn_inner": (False, None),
    "use_post_norm": (False, None),
    "norm_layer": ("", None),
    "rope_mrope_section": (None,),
    "use_rot_pos_emb": (True, None),
}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table: that of timm's ViT with EVA's names."""
    scales = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    table = []
    for rule in timm.rules(config):
        name = rule.source.removeprefix("blocks.{i}.")
        if name in scales:
            table.append(Rule("blocks.{i}." + scales[name], rule.target))
        elif not name.startswith("mlp.fc1") and (name != "attn.qkv.bias" or config.use_key_bias):
            table.append(rule)
    if not config.use_key_bias:
        table.append(Rule("blocks.{i}.attn.q_bias", "block_{i}/attention/query/bias"))
        table.append(Rule("blocks.{i}.attn.v_bias", "block_{i}/attention/value/bias"))
    first = {"fc1_g": "gate", "fc1_x": "up"} if config.use_swiglu_ffn else {"fc1": "up"}
    layers = {f"blocks.{{i}}.mlp.{x}": f"block_{{i}}/mlp/{ours}" for x, ours in first.items()}
    return [*table, *encoder_rules.dense(layers)]


def _fields(file: timm.TimmFile) -> dict[str, Any]:
    form, get = form_of(file.name), file.arguments.get
    rotary = ROTARY[form]
    kind, indexing, half = THEIR_TYPES[rotary.rope_type]
    supported = {"rope_type": (kind, None), "rope_rotate_half": (half, None)}
    if indexing is not None:
        supported["rope_grid_indexing"] = (indexing, None)
    else:
        supported["rope_grid_offset"] = (0.0, None)
    needed = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
    file.check("one of timm's EVAs", needed, SUPPORTED | supported)
    tensors, shared = file.tensors, file.fields()
    has_class = shared["use_class_token"]
    channels, patch = file.patches
    numbers = re.search(r"_patch(\d+)_.*?(\d+)$", file.name.partition(".")[0])
    named = (int(numbers[1]), int(numbers[2])) if numbers else (patch, SIDE)
    sizes = file.sizes or [(named[1], named[1])]
    grid, over = (sizes[0][0] // patch, sizes[0][1] // patch), True
    if "pos_embed" in tensors:
        grid = file.grid(patch, sizes)
        over = tensors["pos_embed"].shape[1] > grid[0] * grid[1]
    side = named[1] // named[0]
    reference = get("ref_feat_shape", (side, side) if rotary.reference else None)
    offset = 1.0 if form == "perception" and has_class else 0.0
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    fields = shared | {
        "image_shape": (grid[0] * patch, grid[1] * patch, channels),
        "patch_size": patch,
        "mlp_dim": tensors[f"blocks.0.mlp.{'fc1_g' if gated else 'fc1'}.weight"].shape[0],
        "layer_norm_epsilon": rotary.epsilon,
        "use_query_bias": _has_bias(tensors, "q_bias"),
        "use_key_bias": _has_bias(tensors),
        "use_value_bias": _has_bias(tensors, "v_bias"),
        "use_position_embedding": "pos_embed" in tensors,
        "position_over_prefix": over or not has_class,
        "use_swiglu_ffn": gated,
        "rope_theta": float(get("rope_temperature", rotary.theta)),
        "rope_type": rotary.rope_type,
        "rope_grid_offset": float(get("rope_grid_offset", offset)),
        "ref_feat_shape": (reference, reference) if isinstance(reference, int) else reference,
        **{ours: get(theirs) for ours, theirs in MOVES.items()},
    }
    if (pooling := tensors.get("attn_pool.mlp.fc1.weight")) is not None:
        usual = POOLING_HEADS if form == "perception" else None  # num_heads
        fields["pooling_num_heads"] = get("attn_pool_num_heads") or usual
        fields["pooling_mlp_dim"] = pooling.shape[0]
        fields["pool_include_prefix"] = True
    return fields


def _has_bias(tensors: Mapping[str, LazyArray], alone: str = "qkv.bias") -> bool:
    return any(f"blocks.0.attn.{name}" in tensors for name in (alone, "qkv.bias"))


FORMAT = timm.TimmFormat(ROTARY, _fields, rules, assumed=())
