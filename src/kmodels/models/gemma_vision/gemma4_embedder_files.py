"""The vision half of Gemma 4 12B in transformers' files: names of tensors and of settings."""

from collections.abc import Mapping
from typing import Any

from kmodels.models.gemma_vision.gemma4_encoder import Gemma4VisionEmbedder
from kmodels.weights import Rule, transpose

KIND = "gemma4_unified_vision"
# Arguments of the layer, with the settings of the same meaning and their usual values.
SETTINGS: dict[str, tuple[str, Any]] = {
    "patch_size": ("patch_size", 16),
    "pool_size": ("pooling_kernel_size", 3),
    "hidden_dim": ("mm_embed_dim", 3840),
    "position_embedding_size": ("mm_posemb_size", 1120),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
}
NORMS = {
    "patch_ln1": "patch_norm",
    "patch_ln2": "patch_embedding_norm",
    "pos_norm": "position_norm",
}
PREFIX, PROJECTOR = "model.vision_embedder.", "model.embed_vision."


def rules(encoder: Gemma4VisionEmbedder) -> list[Rule]:
    """Returns the table, whose names are those of the published files."""
    table = [
        Rule(f"{PREFIX}{theirs}.{theirs_end}", f"{ours}/{end}")
        for theirs, ours in NORMS.items()
        for theirs_end, end in (("weight", "scale"), ("bias", "bias"))
    ]
    return [
        *table,
        Rule(f"{PREFIX}patch_dense.weight", "patch_embedding/kernel", transpose),
        Rule(f"{PREFIX}patch_dense.bias", "patch_embedding/bias"),
        Rule(f"{PREFIX}pos_embedding", "position_embeddings"),
        Rule(f"{PROJECTOR}embedding_projection.weight", "input_projection/kernel", transpose),
    ]


def settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """Returns the arguments that a vision_config says, and what the layer has no counterpart for.

    Args:
        vision: the vision_config.
    """
    held = {ours: vision.get(theirs, usual) for ours, (theirs, usual) in SETTINGS.items()}
    width = vision.get("output_proj_dims", held["hidden_dim"])
    kind = vision.get("model_type", KIND)
    return held, {
        f"model_type={kind!r} of the vision_config": kind != KIND,
        f"output_proj_dims={width}, which is to be mm_embed_dim": width != held["hidden_dim"],
    }


def form(encoder: Gemma4VisionEmbedder) -> dict[str, Any]:
    """Returns the vision_config of a layer."""
    held = {theirs: getattr(encoder, ours) for ours, (theirs, _) in SETTINGS.items()}
    return {"model_type": KIND, **held, "output_proj_dims": encoder.hidden_dim}
