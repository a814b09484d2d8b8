"""ViTs that take images of any aspect ratio as rows of patches (Dehghani et al. 2023, NaViT)."""

from kmodels.models.vit.naflex.classifier import NaFlexViTImageClassifier
from kmodels.models.vit.naflex.model import NaFlexViTBackbone, SigLIPNaFlexVisionEncoder
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor

__all__ = [
    "NaFlexViTBackbone",
    "NaFlexViTImageClassifier",
    "NaFlexViTImageClassifierPreprocessor",
    "SigLIPNaFlexVisionEncoder",
]
