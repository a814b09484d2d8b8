"""The model families: each is one module or one flat folder, loaded when it is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors
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
        Gemma3TextEmbedder,
        Gemma3TextEmbedderPreprocessor,
        Gemma3Tokenizer,
        Gemma4Backbone,
        Gemma4CausalLM,
        Gemma4CausalLMPreprocessor,
        Gemma4Tokenizer,
        GemmaBackbone,
        GemmaCausalLM,
        GemmaCausalLMPreprocessor,
        GemmaConfig,
        GemmaTextEmbedder,
        GemmaTextEmbedderPreprocessor,
        GemmaTokenizer,
    )
    from kmodels.models.gemma_vision import (
        Gemma3ImageConverter,
        Gemma3ImageTextBackbone,
        Gemma3ImageTextConfig,
        Gemma3ImageTextLM,
        Gemma3ImageTextLMPreprocessor,
        Gemma3VisionEncoder,
        Gemma4ImageConverter,
        Gemma4ImageTextBackbone,
        Gemma4ImageTextConfig,
        Gemma4ImageTextLM,
        Gemma4ImageTextLMPreprocessor,
        Gemma4VisionEmbedder,
        Gemma4VisionEncoder,
    )
    from kmodels.models.llama3 import (
        Llama3Backbone,
        Llama3CausalLM,
        Llama3CausalLMPreprocessor,
        Llama3Config,
        Llama3Tokenizer,
    )
    from kmodels.models.qwen3 import (
        Qwen3Backbone,
        Qwen3CausalLM,
        Qwen3CausalLMPreprocessor,
        Qwen3Config,
        Qwen3TextEmbedder,
        Qwen3TextEmbedderPreprocessor,
        Qwen3Tokenizer,
    )
    from kmodels.models.siglip import (
        SigLIPPreprocessor,
        SigLIPTextConfig,
        SigLIPTextEncoder,
        SigLIPTokenizer,
    )
    from kmodels.models.two_towers import (
        CLIPBackbone,
        ImageTextPreprocessor,
        ImageTextSimilarity,
        SigLIPBackbone,
        TwoTowersConfig,
    )
    from kmodels.models.vit import (
        CLIPImageConverter,
        CLIPVisionEncoder,
        DeiTBackbone,
        DeiTImageClassifier,
        DeiTImageClassifierPreprocessor,
        DeiTImageConverter,
        DINOHead,
        DINOV2Backbone,
        DINOV2ImageConverter,
        DINOV3Backbone,
        DINOV3ImageConverter,
        EoMTImageSegmenter,
        NaFlexViTBackbone,
        NaFlexViTImageClassifier,
        NaFlexViTImageClassifierPreprocessor,
        SigLIPImageConverter,
        SigLIPNaFlexVisionEncoder,
        SigLIPVisionEncoder,
        ViTBackbone,
        ViTConfig,
        ViTImageClassifier,
        ViTImageClassifierPreprocessor,
        ViTImageConverter,
        ViTImageSegmenter,
        ViTImageSegmenterPreprocessor,
        ViTMAEForPreTraining,
    )

# The public names of each family.
FAMILIES = {
    "clip": (
        *("CLIPPreprocessor", "CLIPTextConfig", "CLIPTextEncoder"),
        *("CLIPTextModelWithProjection", "CLIPTokenizer"),
    ),
    "gemma": (
        *("Gemma3Backbone", "Gemma3CausalLM", "Gemma3CausalLMPreprocessor"),
        *("Gemma3TextEmbedder", "Gemma3TextEmbedderPreprocessor", "Gemma3Tokenizer"),
        *("Gemma4Backbone", "Gemma4CausalLM", "Gemma4CausalLMPreprocessor"),
        *("Gemma4Tokenizer", "GemmaBackbone", "GemmaCausalLM", "GemmaCausalLMPreprocessor"),
        *("GemmaConfig", "GemmaTextEmbedder", "GemmaTextEmbedderPreprocessor"),
        "GemmaTokenizer",
    ),
    "gemma_vision": (
        *("Gemma3ImageConverter", "Gemma3ImageTextBackbone", "Gemma3ImageTextConfig"),
        *("Gemma3ImageTextLM", "Gemma3ImageTextLMPreprocessor", "Gemma4ImageConverter"),
        *("Gemma4ImageTextBackbone", "Gemma4ImageTextConfig", "Gemma4ImageTextLM"),
        "Gemma4ImageTextLMPreprocessor",
        *("Gemma3VisionEncoder", "Gemma4VisionEmbedder", "Gemma4VisionEncoder"),
    ),
    "llama3": (
        *("Llama3Backbone", "Llama3CausalLM", "Llama3CausalLMPreprocessor", "Llama3Config"),
        "Llama3Tokenizer",
    ),
    "qwen3": (
        *("Qwen3Backbone", "Qwen3CausalLM", "Qwen3CausalLMPreprocessor", "Qwen3Config"),
        *("Qwen3TextEmbedder", "Qwen3TextEmbedderPreprocessor", "Qwen3Tokenizer"),
    ),
    "siglip": (
        *("SigLIPPreprocessor", "SigLIPTextConfig", "SigLIPTextEncoder", "SigLIPTokenizer"),
    ),
    "two_towers": (
        *("CLIPBackbone", "ImageTextPreprocessor", "ImageTextSimilarity", "SigLIPBackbone"),
        "TwoTowersConfig",
    ),
    "vit": (
        *("CLIPImageConverter", "CLIPVisionEncoder", "DeiTBackbone", "DeiTImageClassifier"),
        *("DeiTImageClassifierPreprocessor", "DeiTImageConverter", "DINOHead"),
        *("DINOV2Backbone", "DINOV2ImageConverter", "DINOV3Backbone", "DINOV3ImageConverter"),
        *("EoMTImageSegmenter", "NaFlexViTBackbone", "NaFlexViTImageClassifier"),
        *("NaFlexViTImageClassifierPreprocessor", "SigLIPImageConverter"),
        *("SigLIPNaFlexVisionEncoder", "SigLIPVisionEncoder", "ViTBackbone", "ViTConfig"),
        *("ViTImageClassifier", "ViTImageClassifierPreprocessor", "ViTImageConverter"),
        *("ViTImageSegmenter", "ViTImageSegmenterPreprocessor", "ViTMAEForPreTraining"),
    ),
}
_MODULES = {name: family for family, names in FAMILIES.items() for name in names}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kmodels.models.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kmodels.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
