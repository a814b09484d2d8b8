"""MAE's decoder in Hugging Face directories, whose encoder is a ViT's."""

from collections.abc import Iterable, Mapping
from typing import Any

from kmodels.models.blocks import encoder_rules
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights.huggingface_config import block_rules
from kmodels.weights import Rule

KIND = "vit_mae"
PREFIX = "decoder."
BLOCK = "decoder_encoder.layer.{i}"
# The settings of the task, with transformers' defaults.
SETTINGS = {
    "decoder_hidden_size": 512,
    "decoder_num_hidden_layers": 8,
    "decoder_num_attention_heads": 16,
    "decoder_intermediate_size": 2048,
    "mask_ratio": 0.75,
    "norm_pix_loss": False,
}


def rules() -> list[Rule]:
    """Returns the table of the decoder."""
    table = [
        Rule("mask_token", "decoder/mask_token"),
        Rule("decoder_pos_embed", "decoder/position_embedding"),
        *encoder_rules.dense(
            {"decoder_embed": "decoder/embed", "decoder_pred": "decoder/prediction"}
        ),
        *block_rules(BLOCK, "decoder/block_{i}"),
        *encoder_rules.norms({"decoder_norm": "decoder/norm"}),
    ]
    return encoder_rules.prefixed(PREFIX, table)


def settings(description: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Returns the settings of the task that a config.json describes; none without a decoder.

    Args:
        description: the object in config.json.
        tensors: names in the file; empty if it was not opened.
    """
    names = set(tensors)
    if description["model_type"] != KIND or (names and not _of_decoder(names)):
        return {}
    return {name: description.get(name, usual) for name, usual in SETTINGS.items()}


def _of_decoder(names: Iterable[str]) -> bool:
    return any(name.startswith(PREFIX) for name in names)


def notice(names: Iterable[str]) -> str | None:
    """Returns the notice that the decoder is left out; None if there is no decoder."""
    number = sum(name.startswith(PREFIX) for name in names)
    if not number:
        return None
    return f"{PREFIX}*, {number} tensors of MAE's pretraining alone, are left out"


def describe(config: ViTConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json that other models of transformers have not.

    Args:
        config: config of the encoder.
        settings: of the task.
    """
    return {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": KIND,
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": True,
        **{name: settings[name] for name in SETTINGS},
    }
