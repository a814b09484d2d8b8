"""Vision Transformers (Dosovitskiy et al. 2021) and their common variants."""

from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.image_converter import ViTImageConverter
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor

__all__ = [
    "ViTBackbone",
    "ViTConfig",
    "ViTImageClassifier",
    "ViTImageClassifierPreprocessor",
    "ViTImageConverter",
]
