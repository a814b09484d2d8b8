"""Gemma's blocks and backbones, with keras-hub's names and arguments.

Differences from a plain decoder, by generation:
- 1: embeddings times sqrt(D), norms that multiply by 1 + scale, rotary positions, few key/value
  heads, a gated MLP with the tanh form of GELU, and the embedding table as output layer;
- 2: norms after attention and MLP too, soft caps on attention scores and logits, and a sliding
  window in every other block;
- 3: norms on queries and keys instead of the caps, five local blocks to a global one, and another
  rotary base in the global ones;
- 4: a norm of the values, unscaled attention scores, norms that multiply by their scale alone, a
  factor for each block; global blocks with another head width and partial rotary position
  embedding; blocks that share keys and values; and per-layer embeddings.
"""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.decoder_block import DecoderAttention, DecoderBlock
from kmodels.models.blocks.hub_order import TextOrImages, in_order
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.huggingface import peft_names
from kmodels.models.gemma.presets import GEMMA_3, GEMMA_4

# === Blocks ===


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaAttention(DecoderAttention):
    """`DecoderAttention` of a `GemmaConfig`, with a window in local blocks."""

    config_class = GemmaConfig


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBlock(DecoderBlock):
    """`DecoderBlock` of a `GemmaConfig`: post-norms of attention and MLP from Gemma 2 on."""

    config_class = GemmaConfig
    attention_class = GemmaAttention


# === Backbones ===

# Defaults of keras-hub's `Gemma3Backbone`.
HUB_DEFAULTS: dict[str, Any] = {
    **{name: GEMMA_3[name] for name in ("use_query_key_norm", "global_rope_wavelength")},
    **{name: GEMMA_3[name] for name in ("gate_dim_reduction", "sliding_window_pattern")},
    "sliding_window_size": 1024,
}
# Defaults of keras-hub's `Gemma4Backbone`.
HUB_DEFAULTS_4: dict[str, Any] = {**GEMMA_4, "global_rope_partial_rotary_factor": 1.0}
ROPES = {"local_rope_wavelength": 10_000.0, "global_rope_wavelength": 1_000_000.0}
GROUPS = "num_global_key_value_heads"
# Arguments of parts that are not supported; keras-hub's configs hold them as None.
ABSENT = ("pooling_intermediate_dim", "embedding_dim", "num_audio_tokens_per_clip")

SIZES = (
    *("vocabulary_size", "image_size", "num_layers", "num_query_heads", "num_key_value_heads"),
    *("hidden_dim", "intermediate_dim", "head_dim", "query_head_dim_normalize"),
)
ORDER_3 = (
    *(*SIZES, "use_query_key_norm", "use_post_ffw_norm", "use_post_attention_norm"),
    *("attention_logit_soft_cap", "final_logit_soft_cap", "use_sliding_window_attention"),
    *("sliding_window_size", "local_rope_scaling_factor", "global_rope_scaling_factor"),
    *("vision_encoder", "layer_norm_epsilon", "use_bidirectional_attention", "dropout"),
    *("is_embedding_model", "pooling_intermediate_dim", "embedding_dim", "dtype"),
)
ORDER_4 = (
    *(*SIZES, "attention_logit_soft_cap", "final_logit_soft_cap", "use_sliding_window_attention"),
    *("sliding_window_size", "sliding_window_pattern", "layer_types", "global_head_dim"),
    *("local_rope_scaling_factor", "global_rope_scaling_factor", "vision_encoder"),
    *("audio_encoder", "num_audio_tokens_per_clip", "layer_norm_epsilon"),
    *("use_bidirectional_attention", "use_vision_bidirectional_attention", "dropout"),
    *("is_embedding_model", "pooling_intermediate_dim", "embedding_dim", "num_kv_shared_layers"),
    *(GROUPS, "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("global_rope_wavelength", "local_rope_wavelength", "global_rope_partial_rotary_factor"),
    *("use_double_wide_mlp", "enable_moe_block", "num_experts", "expert_intermediate_dim"),
    *("num_experts_per_token", "dtype"),
)


def hub_fields_4(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the config for the arguments of keras-hub's `Gemma4Backbone`.

    A number of key/value heads for global layers makes their keys the values too, unless
    `attention_k_eq_v` is among the arguments.
    """
    arguments = {**HUB_DEFAULTS_4, **fields}
    arguments |= {name: usual for name, usual in ROPES.items() if arguments.get(name) is None}
    if "attention_k_eq_v" not in fields and (groups := arguments.get(GROUPS)) is not None:
        arguments["attention_k_eq_v"] = True
        arguments[GROUPS] = None if groups == arguments.get("num_key_value_heads") else groups
    return arguments


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBackbone(DecoderBackbone):
    """A Gemma 1, 2, 3 or 4 (dense) without its output layer.

    Args:
        *args: see `DecoderBackbone`; in keras-hub's order. For Gemma 1 and 2 `intermediate_dim` is
            twice the width of the MLP's gate.
        **kwargs: the other fields of `GemmaConfig`.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool} -> hidden states (B, T, D).
        Tokens with mask 0 are ignored at any position: no token attends to them, positions and
        windows do not count them, and their own hidden states are undefined. Without a mask, or
        for token ids (B, T) alone, no token is masked. For packed rows add "segment_ids" (B, T)
        int, equal for the tokens of one text, and "positions" (B, T) int, from 0 in each text.
        Keras warns about other names and ignores them.

    Raises:
        InputError: for sizes that do not fit together, or names that are not in `GemmaConfig`.

    Source:
        Gemma Team, arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786; variants as in
        Transformers' `modeling_gemma`, `modeling_gemma2`, `modeling_gemma3`, `modeling_gemma4`.
    """

    config_class = GemmaConfig
    block_class = GemmaBlock
    family = "gemma"
    peft_names = staticmethod(peft_names)
    __init__ = in_order(
        *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads"),
        *("hidden_dim", "intermediate_dim", "head_dim", "query_head_dim_normalize"),
        *("use_post_ffw_norm", "use_post_attention_norm", "attention_logit_soft_cap"),
        *("final_logit_soft_cap", "use_sliding_window_attention", "sliding_window_size"),
        *("layer_norm_epsilon", "dropout", "dtype"),
    )(DecoderBackbone.__init__)


class HubBackbone(TextOrImages, GemmaBackbone):
    """A `GemmaBackbone` with keras-hub's arguments, text-only or with a vision encoder.

    The base of `Gemma3Backbone` and `Gemma4Backbone`.

    Attributes:
        vision_encoder: the vision encoder, None for a text-only model.
    """

    vision_encoder: Any
    image_argument = "vision_encoder"

    @classmethod
    def known(cls, fields: Mapping[str, Any], vision_encoder: object) -> dict[str, Any]:
        """Returns the arguments without those of unsupported parts that are None or False."""
        name = cls.__name__
        if fields.get("is_embedding_model"):
            raise InputError(
                f"{name} ends at the hidden states; give it to GemmaTextEmbedder with dense="
                '[{"units": pooling_intermediate_dim}, {"units": embedding_dim}]'
            )
        if fields.get("audio_encoder") is not None:
            raise InputError(f"{name} reads no audio; leave audio_encoder out")
        left = {"is_embedding_model", "audio_encoder"}
        left |= {name for name in ABSENT if fields.get(name) is None}
        if vision_encoder is None:  # there are no tokens of images
            left.add("use_vision_bidirectional_attention")
        known = {name: x for name, x in fields.items() if name not in left}
        return known if vision_encoder is None else {**known, "vision_encoder": vision_encoder}


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Backbone(HubBackbone):
    """`GemmaBackbone` with the defaults and arguments of keras-hub's class of this name.

    Args:
        image_size: side of the images of the vision encoder; not used in a text-only model.
        vision_encoder: a `Gemma3VisionEncoder`, to create a `Gemma3ImageTextBackbone`, or None.
        **fields: arguments of `GemmaBackbone`. `is_embedding_model` must be False: use
            `GemmaTextEmbedder` instead.

    Raises:
        InputError: for an embedding model.
    """

    order = ORDER_3
    image_family = "gemma_vision"

    @in_order(*ORDER_3)
    def __init__(self, image_size: object = None, vision_encoder: object = None, **fields: Any):
        super().__init__(**{**HUB_DEFAULTS, **self.known(fields, vision_encoder)})
        if vision_encoder is None:
            self.vision_encoder = None


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4Backbone(HubBackbone):
    """`GemmaBackbone` with the defaults and arguments of keras-hub's class of this name.

    Args:
        image_size: side of the images of keras-hub's encoder; not used.
        vision_encoder: a `Gemma4VisionEncoder`, to create a `Gemma4ImageTextBackbone`, or None.
        **fields: arguments of `GemmaBackbone`. `is_embedding_model` must be False and
            `audio_encoder` None.

    Raises:
        InputError: for an embedding model, or an audio encoder.
    """

    order = ORDER_4
    image_family = "gemma4_vision"

    @in_order(*ORDER_4)
    def __init__(self, image_size: object = None, vision_encoder: object = None, **fields: Any):
        super().__init__(**hub_fields_4(self.known(fields, vision_encoder)))
        if vision_encoder is None:
            self.vision_encoder = None
