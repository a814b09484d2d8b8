"""The description of the family that the loaders use."""

from kmodels.models.clip.embedder import CLIPTextModelWithProjection
from kmodels.models.clip.model import CLIPTextEncoder
from kmodels.models.clip.presets import PRESETS
from kmodels.models.clip.weights import huggingface
from kmodels.models.common.sizes import encoder
from kmodels.models.registry import Family

FAMILY = Family(
    name="clip",
    backbone=CLIPTextEncoder,
    tasks=(CLIPTextModelWithProjection,),
    presets=PRESETS,
    formats=(huggingface,),
    parts={"projection_dim": ("text_projection/",)},
    defaults=lambda config, task: task,
    fit_preprocessor=lambda given, config: {"sequence_length": config.max_sequence_length, **given},
    fit=lambda tensors, held, wanted: tensors,
    sizes=encoder,
    transformers_form=huggingface.transformers_form,
    keras_hub=(),
)
