"""The description of the family that the loaders use."""

from kmodels.models.common.gguf.image_text import GGUFImageTextFormat
from kmodels.models.common.image_text.keras_hub import with_images
from kmodels.models.common.sizes import without_images
from kmodels.models.gemma.weights import gguf
from kmodels.models.gemma.weights.keras_hub_config import GEMMA3
from kmodels.models.gemma_vision.causal_lm import Gemma3ImageTextLM
from kmodels.models.gemma_vision.config import Gemma3ImageTextConfig
from kmodels.models.gemma_vision.model import Gemma3ImageTextBackbone
from kmodels.models.gemma_vision.presets import PRESETS
from kmodels.models.gemma_vision.weights import huggingface
from kmodels.models.registry import Family
from kmodels.models.vit.weights import gemma3_hub, gemma3_mmproj

GGUF = GGUFImageTextFormat(gguf.FORMAT_3, gemma3_mmproj.EXPORT, Gemma3ImageTextConfig)
FAMILY = Family(
    name="gemma_vision",
    backbone=Gemma3ImageTextBackbone,
    tasks=(Gemma3ImageTextLM,),
    presets=PRESETS,
    formats=(huggingface.FORMAT, GGUF),
    sizes=without_images,
    transformers_form=huggingface.transformers_form,
    keras_hub=(
        with_images(GEMMA3, Gemma3ImageTextBackbone, Gemma3ImageTextLM, gemma3_hub.ENCODER),
    ),
)
