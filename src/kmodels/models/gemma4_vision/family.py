"""The description of the family that the loaders use."""

from typing import Any

from kmodels.models.common.sizes import without_images
from kmodels.models.gemma4_vision.causal_lm import Gemma4ImageTextLM
from kmodels.models.gemma4_vision.config import Gemma4ImageTextConfig
from kmodels.models.gemma4_vision.model import Gemma4ImageTextBackbone
from kmodels.models.gemma4_vision.presets import PRESETS
from kmodels.models.gemma4_vision.weights import huggingface
from kmodels.models.registry import Family



def fit_preprocessor(given: dict[str, Any], config: Gemma4ImageTextConfig) -> dict[str, Any]:
    """Returns arguments whose image converter cuts patches of the size that the model takes."""
    encoder = config.encoder()
    held = {
        "patch_size": encoder.patch_size,
        "pooling_kernel_size": encoder.pool_size,
        "merge_patches": encoder.side != encoder.patch_size,
    }
    return {**given, "image_converter": {**(given.get("image_converter") or {}), **held}}


FAMILY = Family(
    name="gemma4_vision",
    backbone=Gemma4ImageTextBackbone,
    tasks=(Gemma4ImageTextLM,),
    presets=PRESETS,
    formats=huggingface.FORMATS,
    sizes=without_images,
    transformers_form=huggingface.transformers_form,
    fit_preprocessor=fit_preprocessor,
)
