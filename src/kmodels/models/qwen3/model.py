"""Qwen 3: what its block and its backbone are called by, in keras-hub's words.

What differs from Gemma 3: norms multiply by their scale alone, the MLP's gate is SiLU, embeddings
are not scaled, no norm stands behind attention and MLP, and large sizes have an output layer.
"""

from typing import Any

import keras

from kmodels.models.common.decoder import DecoderBackbone
from kmodels.models.common.hub_order import in_order
from kmodels.models.common.layers import DecoderBlock
from kmodels.models.qwen3.config import Qwen3Config


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Block(DecoderBlock):
    """`DecoderBlock` of a `Qwen3Config`."""

    config_class = Qwen3Config


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3Backbone(DecoderBackbone):
    """A dense Qwen 3 without its output layer; calls as of `DecoderBackbone`.

    Args:
        vocabulary_size: like the six that follow, as of `DecoderBackbone`; in keras-hub's order.
        num_layers: see there.
        num_query_heads: see there.
        num_key_value_heads: see there.
        head_dim: see there.
        hidden_dim: see there.
        intermediate_dim: see there.
        **more: dtype, name and the other fields of `Qwen3Config`.

    Call:
        {"token_ids", "padding_mask"}, each (B, T) int -> hidden states (B, T, D).

    Source:
        Qwen Team, arXiv:2505.09388; Transformers' `modeling_qwen3`.
    """

    config_class = Qwen3Config
    block_class = Qwen3Block
    family = "qwen3"

    @in_order(
        *("vocabulary_size", "num_layers", "num_query_heads", "num_key_value_heads", "head_dim"),
        *(
            "hidden_dim",
            "intermediate_dim",
            "rope_max_wavelength",
            "rope_scaling_factor",
            "layer_norm_epsilon",
        ),
        *("dropout", "tie_word_embeddings", "sliding_window_size", "dtype"),
    )
    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int,
        num_query_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        hidden_dim: int,
        intermediate_dim: int,
        **more: Any,
    ):
        heads = (num_query_heads, num_key_value_heads)
        widths = (hidden_dim, intermediate_dim, head_dim)
        super().__init__(vocabulary_size, num_layers, *heads, *widths, **more)
