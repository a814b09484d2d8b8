"""Hugging Face directories of DINOv3's Vision Transformers."""

from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import huggingface_config
from kmodels.models.vit.weights.huggingface_config import Tensors, ViTFormat, checkpoint
from kmodels.weights import Rule, SourceCheckpoint, patch_kernel

KIND = "dinov3_vit"
MASK = "embeddings.mask_token"
# There with a length of 0 in models without registers.
REGISTERS = "embeddings.register_tokens"
BLOCK = "layer.{i}"
# transformers 5 holds the blocks one level deeper, and leaves that out of its files.
DEEPER = "model."
BIASES = {
    "use_query_bias": "query_bias",
    "use_key_bias": "key_bias",
    "use_value_bias": "value_bias",
    "use_proj_bias": "proj_bias",
    "use_mlp_bias": "mlp_bias",
}
MOVES = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


def rules(config: ViTConfig, prefix: str = "") -> list[Rule]:
    """Returns the table; `prefix` is the prefix of the blocks' names."""
    block = prefix + BLOCK
    return [
        Rule("embeddings.cls_token", "tokens/class_token"),
        Rule(MASK, "tokens/mask_token"),
        Rule(REGISTERS, "tokens/register_tokens"),
        Rule(
            "embeddings.patch_embeddings.weight",
            "patch_embedding/kernel",
            patch_kernel(config.patch_size, config.image_shape[2]),
        ),
        Rule("embeddings.patch_embeddings.bias", "patch_embedding/bias"),
        Rule(f"{block}.layer_scale1.lambda1", "block_{i}/attention_scale/scale"),
        Rule(f"{block}.layer_scale2.lambda1", "block_{i}/mlp_scale/scale"),
        *encoder_rules.dense(
            {
                f"{block}.attention.q_proj": "block_{i}/attention/query",
                f"{block}.attention.k_proj": "block_{i}/attention/key",
                f"{block}.attention.v_proj": "block_{i}/attention/value",
                f"{block}.attention.o_proj": "block_{i}/attention/output",
                f"{block}.mlp.gate_proj": "block_{i}/mlp/gate",
                f"{block}.mlp.up_proj": "block_{i}/mlp/up",
                f"{block}.mlp.down_proj": "block_{i}/mlp/down",
            }
        ),
        *encoder_rules.norms(
            {
                f"{block}.norm1": "block_{i}/attention_norm",
                f"{block}.norm2": "block_{i}/mlp_norm",
                "norm": "final_norm",
            }
        ),
    ]


def ungated(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with "gelu" as the activation of gated MLPs, whose SiLU is implied.

    Raises:
        InputError: for gates of another activation.
    """
    if not description.get("use_gated_mlp", False):
        return description
    if (activation := description.get("hidden_act", "gelu")) != "silu":
        raise InputError(
            f"{path}: use_gated_mlp with hidden_act {activation!r}; only 'silu' is supported"
        )
    return {**description, "hidden_act": "gelu"}


def turning(path: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding, its draws and the biases that a config.json describes.

    Raises:
        InputError: for a scaled rotary embedding, as transformers refuses it.
    """
    get = description.get
    rope = get("rope_parameters") or {}
    if (kind := rope.get("rope_type") or "default") != "default":
        raise InputError(f"{path}: rope_type is {kind!r}; only 'default' is supported")
    return {
        "rope_theta": float(rope.get("rope_theta", get("rope_theta", 100.0))),
        **{ours: get(theirs, theirs != "key_bias") for ours, theirs in BIASES.items()},
        **{name: get(name, 2.0 if name == "pos_embed_rescale" else None) for name in MOVES},
    }


def _read(path: Path, description: dict[str, Any], tensors: Tensors) -> SourceCheckpoint:
    get = description.get
    defaults = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    backbone = huggingface_config.backbone_fields(path, defaults | ungated(path, description)) | {
        "layer_norm_epsilon": get("layer_norm_eps", 1e-5),
        "drop_path_rate": get("drop_path_rate", 0.0),
        "layer_scale": get("layerscale_value", 1.0),
        "num_register_tokens": get("num_register_tokens", 0),
        "use_mask_token": MASK in tensors if tensors else True,
        "use_swiglu_ffn": get("use_gated_mlp", False),
        "use_position_embedding": False,
        **turning(path, description),
    }
    if REGISTERS in tensors and not tensors[REGISTERS].nbytes:
        del tensors[REGISTERS]
    deeper = any(name.startswith(DEEPER) for name in tensors)
    return checkpoint(
        path,
        backbone,
        task={"pooling": "token", "num_classes": None},
        rules=lambda config: rules(config, DEEPER if deeper else ""),
        tensors=tensors,
    )


FORMAT = ViTFormat((KIND,), _read)
