"""The vision encoder of Gemma 3 in files of transformers, keras-hub and llama.cpp."""

from collections.abc import Callable, Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks.gguf.mmproj import Projector
from kmodels.models.blocks.gguf.tensors import plus_one
from kmodels.models.blocks.keras_hub_mapping import EncoderMapping, dense, norm
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import clip_siglip
from kmodels.models.vit.weights.augreg import patches
from kmodels.weights import LazyArray, Rule, leading_axes

# === Hugging Face: SigLIP's tower and a projector ===

# Names of the tower's settings: here, in config.json, and transformers' default.
CONFIG = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "intermediate_dim": ("intermediate_size", 3072),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
# Settings that all towers have; the head of a tower is ignored.
FIXED = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
}


def settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Returns the arguments of the encoder, and which settings it has no counterpart for.

    Args:
        vision: `vision_config` of a config.json.
    """
    arguments = {ours: vision.get(name, usual) for ours, (name, usual) in CONFIG.items()}
    said = {name: vision.get(name, usual) for name, usual in FIXED.items()}
    return arguments, {
        f"{name}={x!r} of the vision tower": x != FIXED[name] for name, x in said.items()
    }


def form(encoder: Gemma3VisionEncoder) -> dict[str, Any]:
    """Returns the `vision_config` of an encoder."""
    sizes = {theirs: getattr(encoder, ours) for ours, (theirs, _) in CONFIG.items()}
    return {**sizes, **FIXED, "vision_use_head": False}


def rules(config: ViTConfig, tower: str, projector: str) -> list[Rule]:
    """Returns the table of an encoder.

    Args:
        config: config of its tower.
        tower: prefix of the tower's names.
        projector: prefix of the projector's.
    """
    return [
        Rule(f"{projector}mm_input_projection_weight", "input_projection/kernel"),
        Rule(f"{projector}mm_soft_emb_norm.weight", "soft_embedding_norm/scale"),
        *clip_siglip.rules(config, tower),
    ]


# === keras-hub (0.32) ===

# The blocks of its tower always have this epsilon, and no dropout. It is float32 even if its dtype
# is given as the name "bfloat16".
HUB_EPSILON = 1e-6
NAMES = (
    *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers", "intermediate_dim"),
    *("pool_size", "layer_norm_epsilon"),
)
POSITIONS = "tokens/position_embedding"
HUB_TOWER, HUB_OUTPUT = "image_encoder", "vision_output_encoder"
PARTS = {"query_proj": "query", "key_proj": "key", "value_proj": "value", "out_proj": "output"}


def _hub_rules(config: ViTConfig) -> list[Rule]:
    """Returns the table of an encoder, whose attention has no axis of heads."""
    front, block = f"{HUB_TOWER}/encoder_embeddings", f"{HUB_TOWER}/encoder_block_{{i}}"
    table = [
        *patches(config, f"{front}/embedding_conv"),
        Rule(
            f"{front}/position_embedding/embeddings", "tokens/position_embedding", leading_axes(1)
        ),
        *norm(f"{block}/layer_norm_1", "block_{i}/attention_norm"),
        *norm(f"{block}/layer_norm_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp_dense_1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp_dense_2", "block_{i}/mlp/down"),
        *norm(f"{HUB_TOWER}/encoder_layer_norm", "final_norm"),
        Rule(f"{HUB_OUTPUT}/vision_soft_embedding_norm/scale", "soft_embedding_norm/scale"),
        Rule(f"{HUB_OUTPUT}/vision_input_projection/kernel", "input_projection/kernel"),
    ]
    for theirs, ours in PARTS.items():
        source = f"{block}/multi_head_attention/{theirs}"
        table += dense(source, f"block_{{i}}/attention/{ours}")
    return table


def _lacking_in_hub(settings: Mapping[str, Any], window: int | None) -> list[str]:
    """Returns the settings of an encoder that keras-hub does not support or applies differently.

    The window is that of the local layers of the text, or None.
    """
    side = settings["image_size"] // settings["patch_size"] // settings["pool_size"]
    epsilon = settings["layer_norm_epsilon"]
    dropout = settings.get("attention_dropout", 0.0)
    problems = {
        f"layer_norm_epsilon={epsilon} of the vision encoder": epsilon != HUB_EPSILON,
        f"attention_dropout={dropout} of the vision encoder": bool(dropout),
        # Its windows cut an image too, whose tokens all see one another here.
        f"images of {side * side} tokens beside sliding_window_size={window}": (
            window is not None and side * side > window
        ),
    }
    return [name for name, there in problems.items() if there]


KERAS_HUB = EncoderMapping(
    fields=lambda config: {name: config[name] for name in NAMES},
    arguments=lambda encoder: (
        "Gemma3VisionEncoder",
        {name: getattr(encoder, name) for name in (*NAMES, "output_dim")},
    ),
    table=lambda encoder: _hub_rules(encoder.vit_config),
    lacking=_lacking_in_hub,
)


# === GGUF: llama.cpp's projector "gemma3" ===

# Names of the settings: here, and in the file.
MMPROJ = {
    "image_size": "vision.image_size",
    "patch_size": "vision.patch_size",
    "hidden_dim": "vision.embedding_length",
    "intermediate_dim": "vision.feed_forward_length",
    "num_layers": "vision.block_count",
    "num_heads": "vision.attention.head_count",
}
EPSILON, POOL = "vision.attention.layer_norm_epsilon", "vision.projector.scale_factor"
# llama.cpp's default of the pooling.
USUAL_POOL = 4
# It transposes the matrix of the projector as it runs, and adds positions to patches, in these.
TYPES = {"mm.input_projection": "F16", "v.patch_embd": "F32", "v.position_embd": "F32"}
SECOND = "v.blk.0.ffn_down.weight"


def _mmproj_rules(encoder: Gemma3VisionEncoder) -> list[Rule]:
    """Returns the table, with names of Hugging Face; the projector's norm has its 1 in the file."""
    prefixes = ("vision_tower.vision_model.", "multi_modal_projector.")
    return [
        rule if "soft_emb_norm" not in rule.source else Rule(rule.source, rule.target, plus_one)
        for rule in rules(encoder.vit_config, *prefixes)
    ]


def _mmproj_settings(encoder: Gemma3VisionEncoder) -> dict[str, Any]:
    pool = {POOL: encoder.pool_size} if encoder.pool_size != USUAL_POOL else {}
    return {
        **{theirs: getattr(encoder, ours) for ours, theirs in MMPROJ.items()},
        EPSILON: float(encoder.layer_norm_epsilon),
        "use_gelu": True,
        **pool,
    }


def _mmproj_fields(value: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of the encoder of a file.

    Args:
        value: reads a setting by its name without "clip." in front, with a default.

    Raises:
        InputError: for a file that lacks a setting, or has another activation.
    """
    sizes = {ours: value(theirs) for ours, theirs in MMPROJ.items()}
    if missing := [MMPROJ[name] for name, x in sizes.items() if x is None]:
        raise InputError(f"the projector lacks clip.{', clip.'.join(missing)}; convert it again")
    if not value("use_gelu", False):
        raise InputError("the projector has clip.use_gelu=False; the model's activation is GELU")
    return {
        **{name: int(x) for name, x in sizes.items()},
        "pool_size": int(value(POOL, USUAL_POOL)),
        "layer_norm_epsilon": round(float(value(EPSILON, 1e-6)), 12),
    }


def _without_place(encoder: Gemma3VisionEncoder) -> list[str]:
    """Returns the settings that llama.cpp would misinterpret.

    It takes an MLP whose second matrix reads as many numbers as the tower is wide for one of the
    older files, which call the two matrices by each other's names.
    """
    width = encoder.hidden_dim
    square = encoder.intermediate_dim == width
    return [f"intermediate_dim={width}, which is hidden_dim too"] if square else []


def _todays(tensors: Mapping[str, LazyArray], hidden_dim: int) -> dict[str, LazyArray]:
    """Returns tensors by the names of today: older files swap those of the MLP's two matrices."""
    second = tensors.get(SECOND)
    if second is None or second.shape[-1] != hidden_dim:
        return dict(tensors)
    swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    parts = {name: name.split(".") for name in tensors}
    return {".".join(swaps.get(x, x) for x in parts[name]): tensors[name] for name in tensors}


PROJECTOR = Projector(
    "gemma3", _mmproj_settings, _mmproj_fields, _mmproj_rules, _without_place, TYPES, _todays
)
