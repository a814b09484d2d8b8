"""Gemma 1, 2, 3 and 4, text only (Gemma Team 2024, 2024, 2025, 2026)."""

from kmodels.models.gemma.causal_lm import Gemma3CausalLM, Gemma4CausalLM, GemmaCausalLM
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.embedder import (
    Gemma3TextEmbedder,
    Gemma3TextEmbedderPreprocessor,
    GemmaTextEmbedder,
    GemmaTextEmbedderPreprocessor,
)
from kmodels.models.gemma.model import Gemma3Backbone, Gemma4Backbone, GemmaBackbone
from kmodels.models.gemma.preprocessor import (
    Gemma3CausalLMPreprocessor,
    Gemma4CausalLMPreprocessor,
    GemmaCausalLMPreprocessor,
)
from kmodels.models.gemma.tokenizer import Gemma3Tokenizer, Gemma4Tokenizer, GemmaTokenizer

__all__ = [
    "Gemma3Backbone",
    "Gemma3CausalLM",
    "Gemma3CausalLMPreprocessor",
    "Gemma3TextEmbedder",
    "Gemma3TextEmbedderPreprocessor",
    "Gemma3Tokenizer",
    "Gemma4Backbone",
    "Gemma4CausalLM",
    "Gemma4CausalLMPreprocessor",
    "Gemma4Tokenizer",
    "GemmaBackbone",
    "GemmaCausalLM",
    "GemmaCausalLMPreprocessor",
    "GemmaConfig",
    "GemmaTextEmbedder",
    "GemmaTextEmbedderPreprocessor",
    "GemmaTokenizer",
]
