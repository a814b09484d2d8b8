"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

# width, blocks, heads, MLP: Touvron et al. 2021 table 1 (tiny, small), Dosovitskiy et al. 2021
# table 1 (base, large, huge).
SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (192, 12, 3, 768),
    "small": (384, 12, 6, 1536),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "huge": (1280, 32, 16, 5120),
}
PATCHES = (14, 16, 32)
# DeiT III, DINOv2, I-JEPA, Perception Encoder, SigLIP's shape-optimised sizes and OpenCLIP's
# largest, as timm and transformers have them.
LARGER: dict[str, tuple[int, int, int, int]] = {
    "medium": (512, 12, 8, 2048),
    "dinov2_giant": (1536, 40, 24, 4096),
    "pe_gigantic": (1536, 50, 16, 8960),
    "giant": (1408, 40, 16, 6144),
    "so400m": (1152, 27, 16, 4304),
    "giantopt": (1536, 40, 16, 6144),
    "gigantic": (1664, 48, 16, 8192),
}
# width, blocks, heads, MLP, and whether that is gated: Simeoni et al. 2025 table 2 and section 5.1,
# as transformers' configurations of facebook/dinov3-<name>-pretrain-lvd1689m have them.
DINOV3: dict[str, tuple[int, int, int, int, bool]] = {
    "vits16": (384, 12, 6, 1536, False),
    "vits16plus": (384, 12, 6, 1536, True),
    "vitb16": (768, 12, 12, 3072, False),
    "vitl16": (1024, 24, 16, 4096, False),
    "vith16plus": (1280, 32, 20, 5120, True),
    "vit7b16": (4096, 40, 32, 8192, True),
}
# He et al. 2022, as facebook/vit-mae-<size>; Assran et al. 2023, as facebook/ijepa_<name>.
MAE = {"base": 16, "large": 16, "huge": 14}
IJEPA: dict[str, tuple[str, int, int]] = {
    "vith14": ("huge", 14, 224),
    "vith16": ("huge", 16, 448),
    "vitg16": ("giant", 16, 224),
}
# Patch and side, as timm's vit_pe_core_<size>_patch<patch>_<side> (Bolya et al. 2025 table 1 and
# appendix A); rotary angles are those of this side at any other.
PERCEPTION: dict[str, tuple[int, int]] = {
    "tiny": (16, 384),
    "small": (16, 384),
    "base": (16, 224),
    "large": (14, 336),
    "pe_gigantic": (14, 448),
}
DEIT3 = {"small": 16, "medium": 16, "base": 16, "large": 16, "huge": 14}
# Sides of the images by size and patch, of the first SigLIP and of the second. A patch of 14 does
# not divide 384: the model ignores the pixels beyond 378.
SIGLIP: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("base", 16): ((224, 256, 384, 512), (224, 256, 384, 512)),
    ("base", 32): ((), (256,)),
    ("large", 16): ((256, 384), (256, 384, 512)),
    ("so400m", 14): ((224, 384), (224, 384)),
    ("so400m", 16): ((), (256, 384, 512)),
    ("giantopt", 16): ((), (256, 384)),
}
CLIP: dict[tuple[str, int], tuple[int, ...]] = {
    ("base", 32): (224,),
    ("base", 16): (224,),
    ("large", 14): (224, 336),
    ("huge", 14): (224,),
    ("gigantic", 14): (224,),
}


def _size(
    size: str | tuple[int, int, int, int], patch: int, side: int = 224, channels: int = 3
) -> dict[str, Any]:
    width, layers, heads, mlp = (SIZES | LARGER)[size] if isinstance(size, str) else size
    return {
        "image_shape": (side, side, channels),
        "patch_size": patch,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "mlp_dim": mlp,
    }


def _perception(size: str) -> dict[str, Any]:
    patch, side = PERCEPTION[size]
    fields = _size(size, patch, side)
    has_class = size != "pe_gigantic"
    return fields | {
        "layer_norm_epsilon": 1e-5,
        "use_patch_bias": False,
        "use_class_token": has_class,
        "pre_norm": True,
        "rope_theta": 10_000.0,
        "rope_type": "cat",
        "rope_grid_offset": float(has_class),
        "ref_feat_shape": (side // patch, side // patch),
        "pooling_num_heads": 8,
        "pooling_mlp_dim": 4 * fields["hidden_dim"],
        "pool_include_prefix": True,
        "task_pooling": "map",
    }


def _dinov3(name: str) -> dict[str, Any]:
    width, layers, heads, mlp, gated = DINOV3[name]
    # The largest was trained without any bias of queries, keys and values.
    biased = name != "vit7b16"
    return _size((width, layers, heads, mlp), 16) | {
        "use_swiglu_ffn": gated,
        "layer_norm_epsilon": 1e-5,
        "layer_scale": 1e-5,
        "num_register_tokens": 4,
        "use_query_bias": biased,
        "use_key_bias": False,
        "use_value_bias": biased,
        "use_position_embedding": False,
        "rope_theta": 100.0,
        "pos_embed_rescale": 2.0,
    }


def _towers() -> dict[str, dict[str, Any]]:
    """Returns vision towers and other variants, under the names of their checkpoints."""
    presets: dict[str, dict[str, Any]] = {}
    distilled = {"use_distillation_token": True, "task_pooling": "distilled"}
    hugging = {"position_interpolation": "bicubic"}
    for size in ("tiny", "small", "base"):
        presets[f"deit_{size}_patch16_224"] = _size(size, 16)
        presets[f"deit_{size}_distilled_patch16_224"] = _size(size, 16) | distilled
    for size, patch in DEIT3.items():
        scaled = {"layer_scale": 1e-6, "position_over_prefix": False}
        presets[f"deit3_{size}_patch{patch}_224"] = _size(size, patch) | scaled
    presets["deit_base_patch16_384"] = _size("base", 16, 384)
    presets["deit_base_distilled_patch16_384"] = _size("base", 16, 384) | distilled
    for size in ("small", "base", "large", "giant"):
        gated = {"use_swiglu_ffn": True} if size == "giant" else {}
        plain = _size("dinov2_giant" if size == "giant" else size, 14, 518) | gated
        plain |= {"layer_scale": 1e-5}
        presets[f"dinov2_{size}_patch14_518"] = plain | hugging
        registers = {"num_register_tokens": 4, "position_interpolation": "bicubic_antialias"}
        presets[f"dinov2_{size}_reg4_patch14_518"] = plain | registers
    presets |= {f"dinov3_{name}": _dinov3(name) for name in DINOV3}
    presets["eomt_large_patch16_640"] = _size("large", 16, 640) | {
        **{"layer_scale": 1e-5, "num_register_tokens": 4, "position_over_prefix": False},
        **{**hugging, **_queries(4)},
    }
    for name, blocks in (("vits16", 3), ("vitb16", 3), ("vitl16", 4)):
        turning = _dinov3(name) | {"image_shape": (640, 640, 3)}
        presets[f"eomt_dinov3_{name}_640"] = turning | _queries(blocks)
    for size, (patch, side) in PERCEPTION.items():
        name = size.removeprefix("pe_")
        presets[f"pe_core_{name}_patch{patch}_{side}"] = _perception(size)
    # timm's own, whose queries and keys turn by the numbers of row and column.
    presets["vit_base_patch16_rope_reg1_gap_256"] = _size("base", 16, 256) | {
        **{"layer_scale": 1e-5, "use_key_bias": False, "use_position_embedding": False},
        **{"use_class_token": False, "num_register_tokens": 1, "final_norm": False},
        **{"rope_theta": 10_000.0, "rope_type": "cat_ij", "ref_feat_shape": (16, 16)},
        **{"task_pooling": "gap", "task_pooled_norm": True},
    }
    mapped = {"use_class_token": False, "approximate_gelu": True, "task_pooling": "map"}
    for (size, patch), (first, second) in SIGLIP.items():
        for name, sides in (("siglip", first), ("siglip2", second)):
            for side in sides:
                fields = _size(size, patch, side // patch * patch) | mapped | hugging
                presets[f"{name}_{size}_patch{patch}_{side}"] = fields
    native = _size("base", 16, 256) | mapped | {"position_interpolation": "bilinear_antialias"}
    presets["siglip2_base_patch16_naflex"] = native
    for (size, patch), sides in CLIP.items():
        exact = size in ("huge", "gigantic")
        fields = {
            "layer_norm_epsilon": 1e-5,
            "use_patch_bias": False,
            "pre_norm": True,
            # OpenAI's; OpenCLIP trained the larger ones with the exact form.
            "approximate_gelu": False if exact else "sigmoid",
        }
        for side in sides:
            name = f"clip_{size}_patch{patch}_{side}"
            presets[name] = _size(size, patch, side) | fields | hugging
    for size, patch in MAE.items():
        fields = _size(size, patch) | hugging | {"layer_norm_epsilon": 1e-12}
        presets[f"vit_mae_{size}_patch{patch}_224"] = fields
    for name, (size, patch, side) in IJEPA.items():
        presets[f"ijepa_{name}"] = _size(size, patch, side) | hugging | MEAN
    return presets


def _queries(blocks: int) -> dict[str, Any]:
    """Returns the sizes of EoMT's queries (Kerssies et al. 2025, section 4.1)."""
    return {"task_num_queries": 200, "task_num_blocks": blocks, "task_num_upscale_blocks": 2}


MEAN: dict[str, Any] = {"use_class_token": False, "task_pooling": "gap"}
# Backbone fields; keys that start with "task_" are arguments of the task.
PRESETS: dict[str, dict[str, Any]] = (
    {f"vit_{size}_patch{patch}_224": _size(size, patch) for size in SIZES for patch in PATCHES}
    | _towers()
    | {
        # The ViT of Keras' image-classification tutorial at ViT-Base sizes: no class token, mean
        # pooling, dropout 0.1 in the blocks and 0.5 in front of the head.
        "vit_keras_tutorial_base_patch16_224": _size("base", 16)
        | {
            "use_class_token": False,
            "dropout_rate": 0.1,
            "attention_dropout": 0.1,
            "task_pooling": "gap",
            "task_dropout": 0.5,
        },
        # big_vision's configs/vit_s16_i1k.py; its positions are fixed (recipes/vit.py).
        "vit_s16_i1k": _size("small", 16) | MEAN | {"task_intermediate_dim": 384},
        # Small enough to train on two cores: handwritten digits, and Fashion-MNIST.
        "vit_micro_patch2_8": _size((64, 4, 4, 128), 2, 8, 1) | MEAN,
        "vit_micro_patch4_48": _size((64, 4, 4, 128), 4, 48) | MEAN,
        "vit_micro_patch7_28": _size((128, 6, 4, 256), 7, 28, 1) | MEAN,
        "vit_debug": _size((16, 2, 2, 32), 8, 16),
    }
)
