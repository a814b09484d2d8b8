"""Texts as vectors with EmbeddingGemma."""

import keras

from kmodels.models.common.embedder.preprocessor import (
    EmbedderPreprocessor,
    HubEmbedderPreprocessor,
)
from kmodels.models.common.embedder.task import DecoderEmbedder, HubEmbedder
from kmodels.models.gemma.model import Gemma3Backbone, GemmaBackbone
from kmodels.models.gemma.tokenizer import Gemma3Tokenizer, GemmaTokenizer


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTextEmbedderPreprocessor(EmbedderPreprocessor):
    """`EmbedderPreprocessor` of Gemma."""

    family = "gemma"
    tokenizer_class = GemmaTokenizer
    reader = "EmbeddingGemma"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTextEmbedder(DecoderEmbedder):
    """A Gemma that gives one vector for each text; all is as in `DecoderEmbedder`.

    Source:
        EmbeddingGemma Team 2025 (arXiv:2509.20354).
    """

    backbone_class = GemmaBackbone
    preprocessor_class = GemmaTextEmbedderPreprocessor


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3TextEmbedderPreprocessor(HubEmbedderPreprocessor):
    """`HubEmbedderPreprocessor` of Gemma 3."""

    family = "gemma"
    tokenizer_class = Gemma3Tokenizer
    reader = "Gemma 3"
    siblings = ("GemmaTextEmbedderPreprocessor", *GemmaTextEmbedderPreprocessor.siblings)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3TextEmbedder(HubEmbedder):
    """A Gemma 3 that gives one vector for each text; all is as in `HubEmbedder`."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3TextEmbedderPreprocessor
