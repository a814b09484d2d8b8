"""The model families; each is a folder with the same file names."""

from kmodels.models.gemma import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaConfig,
)
from kmodels.models.vit import (
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)

__all__ = [
    "Gemma3Backbone",
    "Gemma3CausalLM",
    "Gemma3CausalLMPreprocessor",
    "GemmaBackbone",
    "GemmaCausalLM",
    "GemmaCausalLMPreprocessor",
    "GemmaConfig",
    "ViTBackbone",
    "ViTConfig",
    "ViTImageClassifier",
    "ViTImageClassifierPreprocessor",
]
