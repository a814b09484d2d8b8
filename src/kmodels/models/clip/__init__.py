"""The text tower of CLIP (Radford et al. 2021)."""

from kmodels.models.clip.config import CLIPTextConfig
from kmodels.models.clip.embedder import CLIPTextModelWithProjection
from kmodels.models.clip.model import CLIPTextEncoder
from kmodels.models.clip.text import CLIPPreprocessor, CLIPTokenizer

__all__ = [
    "CLIPPreprocessor",
    "CLIPTextConfig",
    "CLIPTextEncoder",
    "CLIPTextModelWithProjection",
    "CLIPTokenizer",
]
