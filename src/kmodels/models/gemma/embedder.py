"""Texts as vectors with EmbeddingGemma."""

import keras

from kmodels.models.common.embedder.preprocessor import EmbedderPreprocessor
from kmodels.models.common.embedder.task import DecoderEmbedder
from kmodels.models.gemma.model import GemmaBackbone
from kmodels.models.gemma.tokenizer import GemmaTokenizer


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
