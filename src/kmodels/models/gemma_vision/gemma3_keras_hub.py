"""The mapping between the vision encoder of keras-hub's Gemma 3 (0.32) and ours.

The blocks of its tower always have an epsilon of 1e-6, and no dropout. It is float32 even if its
dtype is given as the name "bfloat16".
"""

from collections.abc import Mapping
from typing import Any

from kmodels.models.blocks.keras_hub_mapping import EncoderMapping
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import keras_hub
from kmodels.weights import Rule, leading_axes

CLASS = "Gemma3VisionEncoder"
EPSILON = 1e-6
NAMES = (
    *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers", "intermediate_dim"),
    *("pool_size", "layer_norm_epsilon"),
)
TOWER, OUTPUT = "image_encoder", "vision_output_encoder"
PARTS = {"query_proj": "query", "key_proj": "key", "value_proj": "value", "out_proj": "output"}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table of an encoder, whose attention has no axis of heads."""
    front, block = f"{TOWER}/encoder_embeddings", f"{TOWER}/encoder_block_{{i}}"
    table = [
        *keras_hub.patches(config, f"{front}/embedding_conv"),
        Rule(f"{front}/position_embedding/embeddings", keras_hub.POSITIONS, leading_axes(1)),
        *keras_hub.norm(f"{block}/layer_norm_1", "block_{i}/attention_norm"),
        *keras_hub.norm(f"{block}/layer_norm_2", "block_{i}/mlp_norm"),
        *keras_hub.dense(f"{block}/mlp_dense_1", "block_{i}/mlp/up"),
        *keras_hub.dense(f"{block}/mlp_dense_2", "block_{i}/mlp/down"),
        *keras_hub.norm(f"{TOWER}/encoder_layer_norm", "final_norm"),
        Rule(f"{OUTPUT}/vision_soft_embedding_norm/scale", "soft_embedding_norm/scale"),
        Rule(f"{OUTPUT}/vision_input_projection/kernel", "input_projection/kernel"),
    ]
    for theirs, ours in PARTS.items():
        source = f"{block}/multi_head_attention/{theirs}"
        table += keras_hub.dense(source, f"block_{{i}}/attention/{ours}")
    return table


def fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments here of an encoder of keras-hub with this config."""
    return {name: given[name] for name in NAMES}


def arguments(encoder: Gemma3VisionEncoder) -> tuple[str, dict[str, Any]]:
    """Returns keras-hub's class of an encoder, and its arguments except for the dtype."""
    held = {name: getattr(encoder, name) for name in (*NAMES, "output_dim")}
    return CLASS, held


def lacking(settings: Mapping[str, Any], window: int | None) -> list[str]:
    """Returns the settings of an encoder that keras-hub does not support or applies differently.

    Args:
        settings: arguments of the encoder, of either side.
        window: window of the local layers of the text, or None if there are none.
    """
    side = settings["image_size"] // settings["patch_size"] // settings["pool_size"]
    epsilon = settings["layer_norm_epsilon"]
    dropout = settings.get("attention_dropout", 0.0)
    found = {
        f"layer_norm_epsilon={epsilon} of the vision encoder": epsilon != EPSILON,
        f"attention_dropout={dropout} of the vision encoder": bool(dropout),
        # Its windows cut an image too, whose tokens all see one another here.
        f"images of {side * side} tokens beside sliding_window_size={window}": (
            window is not None and side * side > window
        ),
    }
    return [name for name, there in found.items() if there]


ENCODER = EncoderMapping(fields, arguments, lambda encoder: rules(encoder.vit_config), lacking)
