"""The description of the family that the loaders use."""

from kmodels.models.clip.embedder import CLIPTextModelWithProjection
from kmodels.models.clip.model import CLIPTextEncoder
from kmodels.models.clip.presets import PRESETS
from kmodels.models.clip.weights.huggingface import FORMAT
from kmodels.models.common.encoder import text_embedder
from kmodels.models.common.sizes import encoder
from kmodels.models.registry import Family

FAMILY = Family(
    name="clip",
    backbone=CLIPTextEncoder,
    tasks=(CLIPTextModelWithProjection,),
    presets=PRESETS,
    formats=(FORMAT,),
    sizes=encoder,
    transformers_form=FORMAT.transformers_form,
    parts=text_embedder.PARTS,
    fit_preprocessor=text_embedder.fit_preprocessor,
)
