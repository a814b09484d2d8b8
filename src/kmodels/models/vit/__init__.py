"""Vision Transformers (Dosovitskiy et al. 2021) and their common variants."""

from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.dino.head import DINOHead
from kmodels.models.vit.eomt.segmenter import EoMTImageSegmenter
from kmodels.models.vit.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.gemma4.blocks import ClippedDense, Gemma4VisionBlock
from kmodels.models.vit.gemma4.embedder import Gemma4VisionEmbedder
from kmodels.models.vit.gemma4.encoder import Gemma4VisionEncoder
from kmodels.models.vit.image_converter import ViTImageConverter
from kmodels.models.vit.kinds import (
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
from kmodels.models.vit.mae.pretraining import ViTMAEForPreTraining
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.naflex import (
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    NaFlexViTImageClassifierPreprocessor,
    SigLIPNaFlexVisionEncoder,
)
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.models.vit.segmentation.preprocessor import ViTImageSegmenterPreprocessor
from kmodels.models.vit.segmentation.segmenter import ViTImageSegmenter
from kmodels.models.vit.tower_kinds import CLIPVisionEncoder, SigLIPVisionEncoder

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
