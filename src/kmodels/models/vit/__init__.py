"""Vision Transformers (Dosovitskiy et al. 2021) and their common variants."""

from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.dino_head import DINOHead
from kmodels.models.vit.hub_classes import (
    CLIPImageConverter,
    CLIPVisionEncoder,
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
)
from kmodels.models.vit.mae import ViTMAEForPreTraining
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.naflex import (
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    NaFlexViTImageClassifierPreprocessor,
    SigLIPNaFlexVisionEncoder,
)
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor, ViTImageConverter
from kmodels.models.vit.segmentation.eomt import EoMTImageSegmenter
from kmodels.models.vit.segmentation.preprocessor import ViTImageSegmenterPreprocessor
from kmodels.models.vit.segmentation.segmenter import ViTImageSegmenter

__all__ = [
    "CLIPImageConverter",
    "CLIPVisionEncoder",
    "DINOHead",
    "DINOV2Backbone",
    "DINOV2ImageConverter",
    "DINOV3Backbone",
    "DINOV3ImageConverter",
    "DeiTBackbone",
    "DeiTImageClassifier",
    "DeiTImageClassifierPreprocessor",
    "DeiTImageConverter",
    "EoMTImageSegmenter",
    "NaFlexViTBackbone",
    "NaFlexViTImageClassifier",
    "NaFlexViTImageClassifierPreprocessor",
    "SigLIPImageConverter",
    "SigLIPNaFlexVisionEncoder",
    "SigLIPVisionEncoder",
    "ViTBackbone",
    "ViTConfig",
    "ViTImageClassifier",
    "ViTImageClassifierPreprocessor",
    "ViTImageConverter",
    "ViTImageSegmenter",
    "ViTImageSegmenterPreprocessor",
    "ViTMAEForPreTraining",
]
