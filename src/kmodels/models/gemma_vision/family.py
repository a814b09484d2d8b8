"""The description of the family that the loaders use."""

from kmodels.models.common.sizes import sizes
from kmodels.models.gemma_vision.causal_lm import Gemma3ImageTextLM
from kmodels.models.gemma_vision.model import Gemma3ImageTextBackbone
from kmodels.models.gemma_vision.presets import PRESETS
from kmodels.models.gemma_vision.weights import huggingface
from kmodels.models.registry import Family

FAMILY = Family(
    name="gemma_vision",
    backbone=Gemma3ImageTextBackbone,
    tasks=(Gemma3ImageTextLM,),
    presets=PRESETS,
    formats=(huggingface.FORMAT,),
    sizes=sizes,
    transformers_form=huggingface.transformers_form,
)
