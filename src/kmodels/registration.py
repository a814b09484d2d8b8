"""Registration of classes by name, before the modules that define them are imported.

`import kmodels` loads no models. Keras looks a class up in its table of registered objects. An
object stands there until the class itself does, and loads it when Keras makes one from its config.
"""

import importlib
from typing import Any

LAYERS = (
    *("Attention", "Dense", "DropPath", "Dropout", "Embedding", "Experts", "GatedMLP"),
    *("GroupedDense", "LayerNorm", "LayerScale", "MLP", "PositionEmbedding", "RMSNorm", "Router"),
    "SwiGLU",
)
CLIP = (
    *("CLIPPreprocessor", "CLIPTextBlock", "CLIPTextEncoder", "CLIPTextModelWithProjection"),
    "CLIPTokenizer",
)
GEMMA = (
    *("Gemma3Backbone", "Gemma3CausalLM", "Gemma3CausalLMPreprocessor", "Gemma3Tokenizer"),
    *("Gemma3TextEmbedder", "Gemma3TextEmbedderPreprocessor", "Gemma4Backbone"),
    *("Gemma4CausalLM", "Gemma4CausalLMPreprocessor", "Gemma4Tokenizer"),
    *("GemmaAttention", "GemmaBackbone", "GemmaBlock", "GemmaCausalLM"),
    *("GemmaCausalLMPreprocessor", "GemmaTextEmbedder", "GemmaTextEmbedderPreprocessor"),
    *("GemmaTokenizer", "PaddingApart", "PerLayerEmbedding", "Reordered", "TokenPooling"),
    *("TokensFirst", "UnitLength"),
)
GEMMA_VISION = (
    *("Gemma3ImageConverter", "Gemma3ImageTextBackbone", "Gemma3ImageTextLM"),
    *("Gemma3ImageTextLMPreprocessor", "Gemma3VisionEncoder"),
    *("Gemma4ImageConverter", "Gemma4ImageTextBackbone", "Gemma4ImageTextLM"),
    *("Gemma4ImageTextLMPreprocessor", "Gemma4VisionBlock", "Gemma4VisionEmbedder"),
    *("Gemma4VisionEncoder", "ClippedDense"),
)
LLAMA3 = (
    *("Llama3Backbone", "Llama3Block", "Llama3CausalLM", "Llama3CausalLMPreprocessor"),
    "Llama3Tokenizer",
)
QWEN3 = (
    *("Qwen3Backbone", "Qwen3Block", "Qwen3CausalLM", "Qwen3CausalLMPreprocessor"),
    *("Qwen3TextEmbedder", "Qwen3TextEmbedderPreprocessor", "Qwen3Tokenizer"),
)
SIGLIP = ("SigLIPPreprocessor", "SigLIPTextBlock", "SigLIPTextEncoder", "SigLIPTokenizer")
TWO_TOWERS = (
    *("CLIPBackbone", "ImageTextPreprocessor", "ImageTextSimilarity", "SigLIPBackbone"),
    *("NaFlexVisionTower", "SimilarityHead", "TextTower", "TwoTowersBackbone", "VisionTower"),
)
VIT = (
    *("PatchEmbedding", "Pooling", "Tokens", "ViTBackbone", "ViTBlock", "ViTImageClassifier"),
    *("ViTImageClassifierPreprocessor", "ViTImageConverter", "DINOV2Backbone", "DeiTBackbone"),
    *("DINOV2ImageConverter", "DeiTImageClassifier", "DeiTImageClassifierPreprocessor"),
    *(
        "CLIPImageConverter",
        "CLIPVisionEncoder",
        "DeiTImageConverter",
        "SigLIPImageConverter",
        "SigLIPVisionEncoder",
    ),
    *("DINOV3Backbone", "DINOV3ImageConverter", "PatchCoordinates", "PatchDropout"),
    *("ViTImageSegmenter", "ViTImageSegmenterPreprocessor", "EoMTImageSegmenter"),
    *("MaskHead", "MaskProbabilities", "Queries", "QueryMasking", "Upscale"),
    *("DINOHead", "MAEDecoder", "PatchMasking", "ViTMAEForPreTraining"),
    *("ImageSegments", "NaFlexPatchEmbedding", "NaFlexPooling", "NaFlexTokens"),
    *("NaFlexViTBackbone", "NaFlexViTImageClassifier", "NaFlexViTImageClassifierPreprocessor"),
    "SigLIPNaFlexVisionEncoder",
)
MODULES = {
    "kmodels.generation.sampler": ("Sampler",),
    "kmodels.generation.samplers": (
        *("BeamSampler", "ContrastiveSampler", "GreedySampler"),
        *("RandomSampler", "TopKSampler", "TopPSampler"),
    ),
    "kmodels.layers": LAYERS,
    "kmodels.models.clip": CLIP,
    "kmodels.models.gemma": GEMMA,
    "kmodels.models.gemma_vision": GEMMA_VISION,
    "kmodels.models.llama3": LLAMA3,
    "kmodels.models.qwen3": QWEN3,
    "kmodels.models.siglip": SIGLIP,
    "kmodels.models.two_towers": TWO_TOWERS,
    "kmodels.models.vit": VIT,
    "kmodels.training.losses": (
        *("CLIPLoss", "ContrastiveLoss", "DINOLoss", "PixelCrossentropy", "SigLIPLoss"),
    ),
    "kmodels.training.metrics": ("MeanIoU", "SparseAccuracy"),
    "kmodels.training.optimizers": ("AdamW", "SGD"),
    "kmodels.training.schedules": ("WarmupSchedule",),
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


def register(known: dict[str, Any]) -> None:
    """Fills Keras' table of registered objects, where kmodels' own are not in it yet."""
    for module, names in MODULES.items():
        for name in names:
            known.setdefault(f"kmodels>{name}", Later(f"kmodels>{name}", module))
