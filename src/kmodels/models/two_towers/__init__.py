"""Models with an image tower and a text tower: CLIP, SigLIP and SigLIP 2."""

from kmodels.models.two_towers.config import TwoTowersConfig
from kmodels.models.two_towers.model import CLIPBackbone, SigLIPBackbone, TwoTowersBackbone
from kmodels.models.two_towers.preprocessor import ImageTextPreprocessor
from kmodels.models.two_towers.similarity import ImageTextSimilarity

__all__ = [
    "CLIPBackbone",
    "ImageTextPreprocessor",
    "ImageTextSimilarity",
    "SigLIPBackbone",
    "TwoTowersBackbone",
    "TwoTowersConfig",
]
