"""The model families; each is a folder with the same file names."""

from kmodels.distribution.layout import register
from kmodels.models.gemma import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaConfig,
    GemmaTokenizer,
)
from kmodels.models.gemma.sharding import LAYOUT as _GEMMA
from kmodels.models.vit import (
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageConverter,
)
from kmodels.models.vit.sharding import LAYOUT as _VIT

for _layout in (_GEMMA, _VIT):
    register(_layout)

__all__ = [
    "Gemma3Backbone",
    "Gemma3CausalLM",
    "Gemma3CausalLMPreprocessor",
    "Gemma3Tokenizer",
    "GemmaBackbone",
    "GemmaCausalLM",
    "GemmaCausalLMPreprocessor",
    "GemmaConfig",
    "GemmaTokenizer",
    "ViTBackbone",
    "ViTConfig",
    "ViTImageClassifier",
    "ViTImageClassifierPreprocessor",
    "ViTImageConverter",
]
