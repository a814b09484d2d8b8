"""Gemma: what its backbone is called by, in keras-hub's words.

What differs from a plain decoder, generation by generation:
- 1: embeddings times sqrt(D), norms that multiply by 1 + scale, rotary positions, few key/value
  heads, a gated MLP with the tanh form of GELU, and the embedding table as output layer;
- 2: norms behind attention and MLP too, soft caps on attention scores and logits, and a sliding
  window in every other block;
- 3: norms on queries and keys instead of the caps, five local blocks to a global one, and another
  rotary base in the global ones;
- 4: a norm of the values, scores that are not scaled, norms that multiply by their scale alone, a
  factor for each block; global blocks with heads of their own, in which a part of the channels
  turns; blocks that use the keys and values of others; and per-layer embeddings.
"""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common.decoder import DecoderBackbone
from kmodels.models.common.hub_order import in_order
from kmodels.models.common.image_text.either import TextOrImages
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.layers import GemmaBlock
from kmodels.models.gemma.presets import GEMMA_3, GEMMA_4
from kmodels.models.gemma.weights import peft

# What keras-hub's Gemma 3 is where nothing is said.
HUB_DEFAULTS: dict[str, Any] = {
    **{name: GEMMA_3[name] for name in ("use_query_key_norm", "global_rope_wavelength")},
    **{name: GEMMA_3[name] for name in ("gate_dim_reduction", "sliding_window_pattern")},
    "sliding_window_size": 1024,
}

# What keras-hub's Gemma 4 is where nothing is said.
HUB_DEFAULTS_4: dict[str, Any] = {**GEMMA_4, "global_rope_partial_rotary_factor": 1.0}
ROPES = {"local_rope_wavelength": 10_000.0, "global_rope_wavelength": 1_000_000.0}
GROUPS = "num_global_key_value_heads"
# Arguments of parts that are not here, which keras-hub's configs hold as None.
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
    found = {**HUB_DEFAULTS_4, **fields}
    found |= {name: usual for name, usual in ROPES.items() if found.get(name) is None}
    if "attention_k_eq_v" not in fields and (groups := found.get(GROUPS)) is not None:
        found["attention_k_eq_v"] = True
        found[GROUPS] = None if groups == found.get("num_key_value_heads") else groups
    return found


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBackbone(DecoderBackbone):
    """A Gemma 1, 2, 3 or 4 (dense) without its output layer.

    Args:
        vocabulary_size: rows of the embedding table.
        num_layers: blocks.
        num_query_heads: heads of the queries.
        num_key_value_heads: heads of keys and values.
        hidden_dim: width of the hidden states.
        intermediate_dim: keras-hub's: for Gemma 1 and 2 twice the width of the MLP's gate.
        head_dim: width of each head.
        dtype: policy, such as "bfloat16"; Keras' global one by default.
        name: name of the model; Keras gives one by default.
        **variants: the other fields of `GemmaConfig`.

    Call:
        {"token_ids": (B, T) int, "padding_mask": (B, T) int or bool} -> hidden states (B, T, D).
        Tokens where the mask is 0 are as if they were not there, wherever they stand: nothing sees
        them, positions and windows do not count them, and their own hidden states have no meaning.
        Without a mask, or for token ids (B, T) alone, all are there. For several texts in a row add
        "segment_ids" (B, T) int, tokens of one text sharing a number, and "positions" (B, T) int,
        from 0 in each text. Other names are left out with Keras' warning.

    Raises:
        InputError: for sizes that do not fit together, or names that `GemmaConfig` lacks.

    Source:
        Gemma Team, arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786; variants as in
        Transformers' `modeling_gemma`, `modeling_gemma2`, `modeling_gemma3`, `modeling_gemma4`.
    """

    config_class = GemmaConfig
    block_class = GemmaBlock
    family = "gemma"
    peft_names = staticmethod(peft.names)
    __init__ = in_order(
        *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads"),
        *("hidden_dim", "intermediate_dim", "head_dim", "query_head_dim_normalize"),
        *("use_post_ffw_norm", "use_post_attention_norm", "attention_logit_soft_cap"),
        *("final_logit_soft_cap", "use_sliding_window_attention", "sliding_window_size"),
        *("layer_norm_epsilon", "dropout", "dtype"),
    )(DecoderBackbone.__init__)


class HubBackbone(TextOrImages, GemmaBackbone):
    """A `GemmaBackbone` by keras-hub's arguments, of text alone or with a vision encoder.

    The base of `Gemma3Backbone` and `Gemma4Backbone`.

    Attributes:
        vision_encoder: the layer of images, None for text alone.
    """

    vision_encoder: Any

    @classmethod
    def asks(cls, given: Mapping[str, Any]) -> bool:
        """Returns True if there is a vision encoder."""
        return given.get("vision_encoder") is not None

    @classmethod
    def known(cls, fields: Mapping[str, Any], vision_encoder: object) -> dict[str, Any]:
        """Returns arguments without those of parts that are neither here nor asked for.

        Raises:
            InputError: for an embedding model or an audio encoder.
        """
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
        if vision_encoder is None:  # of the tokens of images, which there are none of
            left.add("use_vision_bidirectional_attention")
        found = {name: x for name, x in fields.items() if name not in left}
        return found if vision_encoder is None else {**found, "vision_encoder": vision_encoder}


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Backbone(HubBackbone):
    """`GemmaBackbone` with the defaults and arguments of keras-hub's class of this name.

    Args:
        image_size: side of the images of the vision encoder; not used in a model of text alone.
        vision_encoder: a `Gemma3VisionEncoder`, which makes a `Gemma3ImageTextBackbone`, or None.
        **fields: as of `GemmaBackbone`. `is_embedding_model` is False: `GemmaTextEmbedder` has what
            keras-hub's class has then.

    Raises:
        InputError: for an embedding model.
    """

    order = ORDER_3

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
        vision_encoder: a `Gemma4VisionEncoder`, which makes a `Gemma4ImageTextBackbone`, or None.
        **fields: as of `GemmaBackbone`. `is_embedding_model` is False and `audio_encoder` None.

    Raises:
        InputError: for an embedding model, or an audio encoder.
    """

    order = ORDER_4

    @in_order(*ORDER_4)
    def __init__(self, image_size: object = None, vision_encoder: object = None, **fields: Any):
        super().__init__(**hub_fields_4(self.known(fields, vision_encoder)))
        if vision_encoder is None:
            self.vision_encoder = None
