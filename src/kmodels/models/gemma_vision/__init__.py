"""Gemma 3 and Gemma 4 with images: texts and images in, text out."""

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
from kmodels.models.gemma_vision.gemma4_encoder import (
    ClippedDense,
    Gemma4VisionBlock,
    Gemma4VisionEmbedder,
    Gemma4VisionEncoder,
)

__all__ = [
    "ClippedDense",
    "Gemma3ImageConverter",
    "Gemma3ImageTextBackbone",
    "Gemma3ImageTextConfig",
    "Gemma3ImageTextLM",
    "Gemma3ImageTextLMPreprocessor",
    "Gemma3VisionEncoder",
    "Gemma4ImageConverter",
    "Gemma4ImageTextBackbone",
    "Gemma4ImageTextConfig",
    "Gemma4ImageTextLM",
    "Gemma4ImageTextLMPreprocessor",
    "Gemma4VisionBlock",
    "Gemma4VisionEmbedder",
    "Gemma4VisionEncoder",
]
