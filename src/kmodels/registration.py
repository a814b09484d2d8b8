"""Registration of classes by name, before the modules that define them are imported.

`import kmodels` loads no models. Keras looks up a class by its registered name. Until the class is
defined, a placeholder stands in the table and imports its module when Keras makes an object from a
config.
"""

import importlib
from typing import Any

from kmodels import models

# The public models are listed in kmodels.models.
OTHERS = {
    "kmodels.generation.sampler": ("Sampler",),
    "kmodels.generation.samplers": (
        *("BeamSampler", "ContrastiveSampler", "GreedySampler", "RandomSampler", "TopKSampler"),
        "TopPSampler",
    ),
    "kmodels.layers": (
        *("Attention", "Dense", "DropPath", "Dropout", "Embedding", "Experts", "GatedMLP"),
        *("GroupedDense", "LayerNorm", "LayerScale", "MLP", "PositionEmbedding", "RMSNorm"),
        *("Router", "SwiGLU"),
    ),
    "kmodels.models.blocks.decoder_block": ("PerLayerEmbedding",),
    "kmodels.models.blocks.embedder.task": ("TokenPooling", "UnitLength"),
    "kmodels.models.blocks.inputs": ("PaddingApart", "Reordered", "TokensFirst"),
    "kmodels.models.clip": ("CLIPTextBlock",),
    "kmodels.models.gemma.model": ("GemmaAttention", "GemmaBlock"),
    "kmodels.models.gemma_vision.gemma4_encoder": ("ClippedDense", "Gemma4VisionBlock"),
    "kmodels.models.llama3": ("Llama3Block",),
    "kmodels.models.qwen3": ("Qwen3Block",),
    "kmodels.models.siglip": ("SigLIPTextBlock",),
    "kmodels.models.two_towers.model": (
        *("NaFlexVisionTower", "SimilarityHead", "TextTower", "TwoTowersBackbone", "VisionTower"),
    ),
    "kmodels.models.vit.detection": (
        *("BoxHead", "DetectionBlock", "ObjectQueries", "PatchMemory"),
    ),
    "kmodels.models.vit.fewer_tokens": ("PatchDropout",),
    "kmodels.models.vit.layers": ("PatchCoordinates", "PatchEmbedding", "Pooling", "Tokens"),
    "kmodels.models.vit.mae": ("MAEDecoder", "PatchMasking"),
    "kmodels.models.vit.model": ("ViTBlock",),
    "kmodels.models.vit.naflex.layers": (
        *("ImageSegments", "NaFlexPatchEmbedding", "NaFlexPooling", "NaFlexTokens"),
    ),
    "kmodels.models.vit.segmentation.mask_transformer": (
        *("MaskHead", "MaskProbabilities", "Queries", "QueryMasking", "Upscale"),
    ),
    "kmodels.training.losses": (
        *("CLIPLoss", "ContrastiveLoss", "DINOLoss", "MixedBinaryCrossentropy"),
        *("PixelCrossentropy", "SigLIPLoss"),
    ),
    "kmodels.training.metrics": ("MeanIoU", "SparseAccuracy"),
    "kmodels.training.optimizers": (
        *("AdamW", "Lamb", "MomentumSGD", "Muon", "SGD", "WarmupSchedule"),
    ),
}


class Later:
    """Stands for a class of a module that is not imported yet."""

    def __init__(self, name: str, module: str):
        self.name = name
        self.module = module

    def from_config(self, config: dict[str, Any]) -> Any:
        """Returns the object of a config, after the import of its module."""
        from keras.saving import get_custom_objects

        importlib.import_module(self.module)
        return get_custom_objects()[self.name].from_config(config)


def modules() -> dict[str, str]:
    """Returns the module of each registered class by the class' name."""
    listed = {name: module for module, names in OTHERS.items() for name in names}
    for module, names in models.MODULES.items():
        # A config is no Keras object.
        objects = [name for name in names if not name.endswith("Config")]
        listed |= dict.fromkeys(objects, f"kmodels.models.{module}")
    return listed


def register(known: dict[str, Any]) -> None:
    """Adds kmodels' classes to Keras' table of registered objects, unless it has them."""
    for name, module in modules().items():
        known.setdefault(f"kmodels>{name}", Later(f"kmodels>{name}", module))
