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
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.layers import GemmaBlock
from kmodels.models.gemma.presets import GEMMA_3
from kmodels.models.gemma.weights import peft

# What keras-hub's Gemma 3 is where nothing is said.
HUB_DEFAULTS: dict[str, Any] = {
    **{name: GEMMA_3[name] for name in ("use_query_key_norm", "global_rope_wavelength")},
    **{name: GEMMA_3[name] for name in ("gate_dim_reduction", "sliding_window_pattern")},
    "sliding_window_size": 1024,
}

POOLING = ("pooling_intermediate_dim", "embedding_dim")


def hub_fields(fields: Mapping[str, Any], is_embedding_model: bool) -> dict[str, Any]:
    """Returns the fields of the config for the arguments of keras-hub's `Gemma3Backbone`.

    Args:
        fields: what was given.
        is_embedding_model: False.

    Raises:
        InputError: for an embedding model.
    """
    if is_embedding_model:
        raise InputError(
            "Gemma3Backbone ends at the hidden states; give it to GemmaTextEmbedder with dense="
            '[{"units": pooling_intermediate_dim}, {"units": embedding_dim}]'
        )
    given = {name: x for name, x in fields.items() if name not in POOLING or x is not None}
    return {**HUB_DEFAULTS, **given}


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


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Backbone(GemmaBackbone):
    """`GemmaBackbone` with the defaults and arguments of keras-hub's class of this name.

    Args:
        image_size: size of the vision encoder, which is not here; ignored.
        vision_encoder: None.
        is_embedding_model: False; `GemmaTextEmbedder` has what keras-hub's class has then.
        **fields: as of `GemmaBackbone`.

    Raises:
        InputError: for a vision encoder, or an embedding model.
    """

    def __init__(
        self,
        image_size: object = None,
        vision_encoder: object = None,
        is_embedding_model: bool = False,
        **fields: Any,
    ):
        if vision_encoder is not None:
            raise InputError(
                "Gemma3Backbone is text only; use Gemma3ImageTextBackbone, or leave vision_encoder "
                "out"
            )
        super().__init__(**hub_fields(fields, is_embedding_model))
