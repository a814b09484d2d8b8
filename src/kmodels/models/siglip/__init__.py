"""The text tower of SigLIP (Zhai et al. 2023) and SigLIP 2."""

from kmodels.models.siglip.config import SigLIPTextConfig
from kmodels.models.siglip.model import SigLIPTextEncoder
from kmodels.models.siglip.text import SigLIPPreprocessor, SigLIPTokenizer

__all__ = ["SigLIPPreprocessor", "SigLIPTextConfig", "SigLIPTextEncoder", "SigLIPTokenizer"]
