"""The description of the family that the loaders use."""

from kmodels.models.common.sizes import without_images
from kmodels.models.gemma4_vision.causal_lm import Gemma4ImageTextLM
from kmodels.models.gemma4_vision.model import Gemma4ImageTextBackbone
from kmodels.models.gemma4_vision.presets import PRESETS
from kmodels.models.gemma4_vision.weights import huggingface
from kmodels.models.registry import Family
from kmodels.models.vit.gemma4 import fields

FAMILY = Family(
    name="gemma4_vision",
    backbone=Gemma4ImageTextBackbone,
    tasks=(Gemma4ImageTextLM,),
    presets=PRESETS,
    formats=huggingface.FORMATS,
    sizes=without_images,
    transformers_form=huggingface.transformers_form,
    fit_preprocessor=fields.fit_preprocessor,
)
