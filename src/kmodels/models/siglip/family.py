"""The description of the family that the loaders use."""

from kmodels.models.common.sizes import encoder
from kmodels.models.registry import Family
from kmodels.models.siglip.model import SigLIPTextEncoder
from kmodels.models.siglip.presets import PRESETS
from kmodels.models.siglip.weights.huggingface import FORMAT

FAMILY = Family(
    name="siglip",
    backbone=SigLIPTextEncoder,
    tasks=(),
    presets=PRESETS,
    formats=(FORMAT,),
    sizes=encoder,
    transformers_form=FORMAT.transformers_form,
)
