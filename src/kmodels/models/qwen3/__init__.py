"""Qwen 3, dense (Qwen Team 2025)."""

from kmodels.models.qwen3.causal_lm import Qwen3CausalLM
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.models.qwen3.embedder import Qwen3TextEmbedder, Qwen3TextEmbedderPreprocessor
from kmodels.models.qwen3.model import Qwen3Backbone
from kmodels.models.qwen3.text import Qwen3CausalLMPreprocessor, Qwen3Tokenizer

__all__ = [
    "Qwen3Backbone",
    "Qwen3CausalLM",
    "Qwen3CausalLMPreprocessor",
    "Qwen3Config",
    "Qwen3TextEmbedder",
    "Qwen3TextEmbedderPreprocessor",
    "Qwen3Tokenizer",
]
