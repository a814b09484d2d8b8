"""The model families; each is a folder with the same file names."""

from kmodels.models.vit import (
    ViTBackbone,
    ViTConfig,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)

__all__ = ["ViTBackbone", "ViTConfig", "ViTImageClassifier", "ViTImageClassifierPreprocessor"]
