"""The vision encoder of Gemma 3 as llama.cpp's projector "gemma3"."""

from collections.abc import Callable, Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks.gguf.mmproj import Projector
from kmodels.models.blocks.gguf.tensors import plus_one
from kmodels.models.gemma_vision import gemma3_huggingface
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.weights import LazyArray, Rule

TOWER, PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
# Names of the settings: here, and in the file.
SETTINGS = {
    "image_size": "vision.image_size",
    "patch_size": "vision.patch_size",
    "hidden_dim": "vision.embedding_length",
    "intermediate_dim": "vision.feed_forward_length",
    "num_layers": "vision.block_count",
    "num_heads": "vision.attention.head_count",
}
EPSILON, POOL = "vision.attention.layer_norm_epsilon", "vision.projector.scale_factor"
# What llama.cpp pools by where a file is silent.
USUAL_POOL = 4
# It transposes the matrix of the projector as it runs, and adds positions to patches, in these.
TYPES = {"mm.input_projection": "F16", "v.patch_embd": "F32", "v.position_embd": "F32"}
SECOND = "v.blk.0.ffn_down.weight"


def rules(encoder: Gemma3VisionEncoder) -> list[Rule]:
    """Returns the table, with names of Hugging Face; the projector's norm has its 1 in the file."""
    return [
        rule if "soft_emb_norm" not in rule.source else Rule(rule.source, rule.target, plus_one)
        for rule in gemma3_huggingface.rules(encoder.vit_config, TOWER, PROJECTOR)
    ]


def settings(encoder: Gemma3VisionEncoder) -> dict[str, Any]:
    """Returns the settings of the file of an encoder."""
    pool = {POOL: encoder.pool_size} if encoder.pool_size != USUAL_POOL else {}
    return {
        **{theirs: getattr(encoder, ours) for ours, theirs in SETTINGS.items()},
        EPSILON: float(encoder.layer_norm_epsilon),
        "use_gelu": True,
        **pool,
    }


def fields(value: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of the encoder of a file.

    Args:
        value: reads a setting by its name without "clip." in front, with a default.

    Raises:
        InputError: for a file that lacks a setting, or has another activation.
    """
    found = {ours: value(theirs) for ours, theirs in SETTINGS.items()}
    if missing := [SETTINGS[name] for name, x in found.items() if x is None]:
        raise InputError(f"the projector lacks clip.{', clip.'.join(missing)}; convert it again")
    if not value("use_gelu", False):
        raise InputError("the projector has clip.use_gelu=False; the model's activation is GELU")
    return {
        **{name: int(x) for name, x in found.items()},
        "pool_size": int(value(POOL, USUAL_POOL)),
        "layer_norm_epsilon": round(float(value(EPSILON, 1e-6)), 12),
    }


def absent(encoder: Gemma3VisionEncoder) -> list[str]:
    """Returns the settings that llama.cpp would misinterpret.

    It takes an MLP whose second matrix reads as many numbers as the tower is wide for one of the
    older files, which call the two matrices by each other's names.
    """
    width = encoder.hidden_dim
    square = encoder.intermediate_dim == width
    return [f"intermediate_dim={width}, which is hidden_dim too"] if square else []


def todays(tensors: Mapping[str, LazyArray], hidden_dim: int) -> dict[str, LazyArray]:
    """Returns tensors by the names of today: older files swap those of the MLP's two matrices.

    Args:
        tensors: of a file.
        hidden_dim: width of the tower.
    """
    second = tensors.get(SECOND)
    if second is None or second.shape[-1] != hidden_dim:
        return dict(tensors)
    swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    parts = {name: name.split(".") for name in tensors}
    return {".".join(swaps.get(x, x) for x in parts[name]): tensors[name] for name in tensors}


EXPORT = Projector("gemma3", settings, fields, rules, absent, TYPES, todays)
