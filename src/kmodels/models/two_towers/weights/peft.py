"""Names of both towers' layers in transformers, under which PEFT keeps adapters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kmodels.models.common.encoder import rules
from kmodels.models.common.encoder.huggingface import EMBEDDINGS, PREFIX, PROJECTION
from kmodels.models.vit.weights import clip_siglip
from kmodels.models.vit.weights.peft import SIGLIP

if TYPE_CHECKING:
    import keras

# The task holds the backbone's layers, and transformers' model has no name in front of them.
VISION = clip_siglip.PREFIX


def names(model: "keras.Model") -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    projects = getattr(model, "backbone", model).config.projects
    vision = rules.names() if projects else SIGLIP
    text = rules.names() | {"token_embedding": EMBEDDINGS["token_embedding"]}
    text |= {} if projects else {"head": "head"}
    found = {_below("vision_encoder", ours): f"{VISION}{x}" for ours, x in vision.items()}
    found |= {_below("text_encoder", ours): f"{PREFIX}{x}" for ours, x in text.items()}
    if projects:
        found |= {"vision_projection": "visual_projection", "text_projection": PROJECTION}
    return [found]


def _below(tower: str, path: str) -> str:
    return f"{tower}/{path}" if path else path
