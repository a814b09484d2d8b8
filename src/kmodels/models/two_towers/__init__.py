"""Models with an image tower and a text tower: CLIP, SigLIP and SigLIP 2."""

from kmodels.models.two_towers.model import (
    CLIPBackbone,
    SigLIPBackbone,
    TwoTowersBackbone,
    TwoTowersConfig,
)
from kmodels.models.two_towers.task import ImageTextPreprocessor, ImageTextSimilarity
from kmodels.models.two_towers.weights import FAMILY

__all__ = [
    "FAMILY",
    "CLIPBackbone",
    "ImageTextPreprocessor",
    "ImageTextSimilarity",
    "SigLIPBackbone",
    "TwoTowersBackbone",
    "TwoTowersConfig",
]
