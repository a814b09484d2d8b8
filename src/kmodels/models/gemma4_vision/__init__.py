"""Gemma 4 with images of any shape: texts and images in, text out."""

from kmodels.models.gemma4_vision.causal_lm import Gemma4ImageTextLM
from kmodels.models.gemma4_vision.config import Gemma4ImageTextConfig
from kmodels.models.gemma4_vision.model import Gemma4ImageTextBackbone
from kmodels.models.gemma4_vision.preprocessor import (
    Gemma4ImageConverter,
    Gemma4ImageTextLMPreprocessor,
)

__all__ = [
    "Gemma4ImageConverter",
    "Gemma4ImageTextBackbone",
    "Gemma4ImageTextConfig",
    "Gemma4ImageTextLM",
    "Gemma4ImageTextLMPreprocessor",
]
