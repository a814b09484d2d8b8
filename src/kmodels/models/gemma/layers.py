"""Gemma's attention and its block, under the names by which files know them."""

import keras

from kmodels.models.common.layers import DecoderAttention, DecoderBlock
from kmodels.models.gemma.config import GemmaConfig


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaAttention(DecoderAttention):
    """`DecoderAttention` of a `GemmaConfig`, which decides between window and whole context.

    Args:
        config: config of the backbone.
        index: number of the block, from 0.

    Call:
        As of `DecoderAttention`: x (B, T, D) -> (B, T, D).

    Weights:
        query (D, N * H), key and value (D, K * H), output (N * H, D): kernel. Gemma 3 has
        query_norm and key_norm: scale (H,).
    """

    config_class = GemmaConfig


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaBlock(DecoderBlock):
    """`DecoderBlock` of a `GemmaConfig`: norms behind attention and MLP in Gemma 2 and 3.

    Args:
        config: config of the backbone.
        index: number of the block, from 0.

    Call:
        As of `DecoderBlock`: x (B, T, D) -> (B, T, D).
    """

    config_class = GemmaConfig
    attention_class = GemmaAttention
