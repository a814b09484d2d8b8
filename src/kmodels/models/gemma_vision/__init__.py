"""Gemma 3 with its vision encoder: texts and images in, text out."""

from kmodels.models.gemma_vision.causal_lm import Gemma3ImageTextLM
from kmodels.models.gemma_vision.config import Gemma3ImageTextConfig
from kmodels.models.gemma_vision.model import Gemma3ImageTextBackbone
from kmodels.models.gemma_vision.preprocessor import (
    Gemma3ImageConverter,
    Gemma3ImageTextLMPreprocessor,
)

__all__ = [
    "Gemma3ImageConverter",
    "Gemma3ImageTextBackbone",
    "Gemma3ImageTextConfig",
    "Gemma3ImageTextLM",
    "Gemma3ImageTextLMPreprocessor",
]
