"""Vision Transformers (Dosovitskiy et al. 2021) and their common variants."""

from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.dino_head import DINOHead
from kmodels.models.vit.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.gemma4.blocks import ClippedDense, Gemma4VisionBlock
from kmodels.models.vit.gemma4.embedder import Gemma4VisionEmbedder
from kmodels.models.vit.gemma4.encoder import Gemma4VisionEncoder
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
    "ClippedDense",
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
    "Gemma3VisionEncoder",
    "Gemma4VisionBlock",
    "Gemma4VisionEmbedder",
    "Gemma4VisionEncoder",
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
