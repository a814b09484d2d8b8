"""The model families; each is a folder with the same file names."""

from kmodels.distribution.layout import register
from kmodels.models.clip import (
    CLIPPreprocessor,
    CLIPTextConfig,
    CLIPTextEncoder,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)
from kmodels.models.gemma import (
    Gemma3Backbone,
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    GemmaConfig,
    GemmaTextEmbedder,
    GemmaTextEmbedderPreprocessor,
    GemmaTokenizer,
)
from kmodels.models.qwen3 import (
    Qwen3Backbone,
    Qwen3CausalLM,
    Qwen3CausalLMPreprocessor,
    Qwen3Config,
    Qwen3Tokenizer,
)
from kmodels.models.vit import (
    DeiTBackbone,
    DeiTImageClassifier,
    DeiTImageClassifierPreprocessor,
    DeiTImageConverter,
    DINOV2Backbone,
    DINOV2ImageConverter,
    DINOV3Backbone,
    DINOV3ImageConverter,
    SigLIPImageConverter,
    SigLIPVisionEncoder,
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageConverter,
)

for _backbone in (CLIPTextEncoder, GemmaBackbone, Qwen3Backbone, ViTBackbone):
    register(_backbone.layout, family=_backbone.family)

__all__ = [
    "CLIPPreprocessor",
    "CLIPTextConfig",
    "CLIPTextEncoder",
    "CLIPTextModelWithProjection",
    "CLIPTokenizer",
    "DINOV2Backbone",
    "DINOV2ImageConverter",
    "DINOV3Backbone",
    "DINOV3ImageConverter",
    "DeiTBackbone",
    "DeiTImageClassifier",
    "DeiTImageClassifierPreprocessor",
    "DeiTImageConverter",
    "Gemma3Backbone",
    "Gemma3CausalLM",
    "Gemma3CausalLMPreprocessor",
    "Gemma3Tokenizer",
    "GemmaBackbone",
    "GemmaCausalLM",
    "GemmaCausalLMPreprocessor",
    "GemmaConfig",
    "GemmaTextEmbedder",
    "GemmaTextEmbedderPreprocessor",
    "GemmaTokenizer",
    "Qwen3Backbone",
    "Qwen3CausalLM",
    "Qwen3CausalLMPreprocessor",
    "Qwen3Config",
    "Qwen3Tokenizer",
    "SigLIPImageConverter",
    "SigLIPVisionEncoder",
    "ViTBackbone",
    "ViTConfig",
    "ViTImageClassifier",
    "ViTImageClassifierPreprocessor",
    "ViTImageConverter",
]
