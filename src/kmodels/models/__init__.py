"""The model families: each is one module or one flat folder, loaded when it is used."""

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors
    from kmodels.models.blocks.causal_lm import CausalLM
    from kmodels.models.blocks.embedder.preprocessor import TextEmbedderPreprocessor
    from kmodels.models.blocks.embedder.task import TextEmbedder
    from kmodels.models.blocks.preprocessing import (
        ImageClassifierPreprocessor,
        ImageObjectDetectorPreprocessor,
        ImageSegmenterPreprocessor,
        ObjectDetectorPreprocessor,
        Preprocessor,
    )
    from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
    from kmodels.models.clip import (
        CLIPPreprocessor,
        CLIPTextConfig,
        CLIPTextEncoder,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        CLIPVisionEncoder,
    )
    from kmodels.models.gemma.config import GemmaConfig
    from kmodels.models.gemma.model import Gemma3Backbone, Gemma4Backbone, GemmaBackbone
    from kmodels.models.gemma.tasks import (
        Gemma3CausalLM,
        Gemma3TextEmbedder,
        Gemma3TextEmbedderPreprocessor,
        Gemma4CausalLM,
        GemmaCausalLM,
        GemmaTextEmbedder,
        GemmaTextEmbedderPreprocessor,
    )
    from kmodels.models.gemma.text import (
        Gemma3CausalLMPreprocessor,
        Gemma3Tokenizer,
        Gemma4CausalLMPreprocessor,
        Gemma4Tokenizer,
        GemmaCausalLMPreprocessor,
        GemmaTokenizer,
    )
    from kmodels.models.gemma_vision.gemma3 import (
        Gemma3ImageConverter,
        Gemma3ImageTextBackbone,
        Gemma3ImageTextConfig,
        Gemma3ImageTextLM,
        Gemma3ImageTextLMPreprocessor,
    )
    from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
    from kmodels.models.gemma_vision.gemma4 import (
        Gemma4ImageConverter,
        Gemma4ImageTextBackbone,
        Gemma4ImageTextConfig,
        Gemma4ImageTextLM,
        Gemma4ImageTextLMPreprocessor,
    )
    from kmodels.models.gemma_vision.gemma4_encoder import Gemma4VisionEmbedder, Gemma4VisionEncoder
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
        SigLIPVisionEncoder,
    )
    from kmodels.models.two_towers.model import CLIPBackbone, SigLIPBackbone, TwoTowersConfig
    from kmodels.models.two_towers.task import ImageTextPreprocessor, ImageTextSimilarity
    from kmodels.models.vit.classification import ImageClassifier
    from kmodels.models.vit.classifier import ViTImageClassifier
    from kmodels.models.vit.config import ViTConfig
    from kmodels.models.vit.detection import ViTObjectDetector, ViTObjectDetectorPreprocessor
    from kmodels.models.vit.dino_head import DINOHead
    from kmodels.models.vit.hub_classes import (
        CLIPImageConverter,
        DeiTBackbone,
        DeiTImageClassifier,
        DeiTImageClassifierPreprocessor,
        DeiTImageConverter,
        DINOV2Backbone,
        DINOV2ImageConverter,
        DINOV3Backbone,
        DINOV3ImageConverter,
        SigLIPImageConverter,
    )
    from kmodels.models.vit.image_task import ImageObjectDetector, ImageSegmenter, ObjectDetector
    from kmodels.models.vit.mae import ViTMAEForPreTraining
    from kmodels.models.vit.model import ViTBackbone
    from kmodels.models.vit.naflex.classifier import NaFlexViTImageClassifier
    from kmodels.models.vit.naflex.model import NaFlexViTBackbone, SigLIPNaFlexVisionEncoder
    from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
    from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor, ViTImageConverter
    from kmodels.models.vit.segmentation.eomt import EoMTImageSegmenter
    from kmodels.models.vit.segmentation.preprocessor import ViTImageSegmenterPreprocessor
    from kmodels.models.vit.segmentation.segmenter import ViTImageSegmenter
    from kmodels.task import Backbone, Task

# The public names by their module.
MODULES = {
    "clip": (
        *("CLIPPreprocessor", "CLIPTextConfig", "CLIPTextEncoder", "CLIPTextModelWithProjection"),
        *("CLIPTokenizer", "CLIPVisionEncoder"),
    ),
    "gemma.config": ("GemmaConfig",),
    "gemma.model": ("Gemma3Backbone", "Gemma4Backbone", "GemmaBackbone"),
    "gemma.tasks": (
        *("Gemma3CausalLM", "Gemma3TextEmbedder", "Gemma3TextEmbedderPreprocessor"),
        *("Gemma4CausalLM", "GemmaCausalLM", "GemmaTextEmbedder", "GemmaTextEmbedderPreprocessor"),
    ),
    "gemma.text": (
        *("Gemma3CausalLMPreprocessor", "Gemma3Tokenizer", "Gemma4CausalLMPreprocessor"),
        *("Gemma4Tokenizer", "GemmaCausalLMPreprocessor", "GemmaTokenizer"),
    ),
    "gemma_vision.gemma3": (
        *("Gemma3ImageConverter", "Gemma3ImageTextBackbone", "Gemma3ImageTextConfig"),
        *("Gemma3ImageTextLM", "Gemma3ImageTextLMPreprocessor"),
    ),
    "gemma_vision.gemma3_encoder": ("Gemma3VisionEncoder",),
    "gemma_vision.gemma4": (
        *("Gemma4ImageConverter", "Gemma4ImageTextBackbone", "Gemma4ImageTextConfig"),
        *("Gemma4ImageTextLM", "Gemma4ImageTextLMPreprocessor"),
    ),
    "gemma_vision.gemma4_encoder": ("Gemma4VisionEmbedder", "Gemma4VisionEncoder"),
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
        "SigLIPVisionEncoder",
    ),
    "two_towers.model": ("CLIPBackbone", "SigLIPBackbone", "TwoTowersConfig"),
    "two_towers.task": ("ImageTextPreprocessor", "ImageTextSimilarity"),
    "vit.classifier": ("ViTImageClassifier",),
    "vit.config": ("ViTConfig",),
    "vit.detection": ("ViTObjectDetector", "ViTObjectDetectorPreprocessor"),
    "vit.dino_head": ("DINOHead",),
    "vit.hub_classes": (
        *("CLIPImageConverter", "DINOV2Backbone", "DINOV2ImageConverter", "DINOV3Backbone"),
        *("DINOV3ImageConverter", "DeiTBackbone", "DeiTImageClassifier"),
        *("DeiTImageClassifierPreprocessor", "DeiTImageConverter", "SigLIPImageConverter"),
    ),
    "vit.mae": ("ViTMAEForPreTraining",),
    "vit.model": ("ViTBackbone",),
    "vit.naflex.classifier": ("NaFlexViTImageClassifier",),
    "vit.naflex.model": ("NaFlexViTBackbone", "SigLIPNaFlexVisionEncoder"),
    "vit.naflex.preprocessor": ("NaFlexViTImageClassifierPreprocessor",),
    "vit.preprocessor": ("ViTImageClassifierPreprocessor", "ViTImageConverter"),
    "vit.segmentation.eomt": ("EoMTImageSegmenter",),
    "vit.segmentation.preprocessor": ("ViTImageSegmenterPreprocessor",),
    "vit.segmentation.segmenter": ("ViTImageSegmenter",),
}
# The bases of classes of several families; their `from_preset` finds the family's own.
BASES = {
    "blocks.causal_lm": ("CausalLM",),
    "blocks.embedder.preprocessor": ("TextEmbedderPreprocessor",),
    "blocks.embedder.task": ("TextEmbedder",),
    "blocks.preprocessing": (
        *("ImageClassifierPreprocessor", "ImageObjectDetectorPreprocessor"),
        *("ImageSegmenterPreprocessor", "ObjectDetectorPreprocessor", "Preprocessor"),
    ),
    "blocks.preprocessor": ("CausalLMPreprocessor",),
    "vit.classification": ("ImageClassifier",),
    "vit.image_task": ("ImageObjectDetector", "ImageSegmenter", "ObjectDetector"),
    ".task": ("Backbone", "Task"),
}
_MODULE_OF = {name: f".{module}" for module, names in (MODULES | BASES).items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
    near = [one for one in _MODULE_OF if one.endswith(name)] or get_close_matches(name, _MODULE_OF)
    hint = f"; did you mean {', '.join(near[:4])}?" if near else ""
    raise AttributeError(f"module 'kmodels.models' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
