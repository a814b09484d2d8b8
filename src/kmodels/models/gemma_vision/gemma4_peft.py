"""Names of PEFT for the layers of a Gemma 4 with images, which are transformers'."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kmodels.models.blocks import peft
from kmodels.models.gemma_vision.gemma4_encoder import Gemma4VisionEncoder
from kmodels.models.gemma_vision.gemma4_encoder_files import BLOCK, LAYERS

if TYPE_CHECKING:
    import keras


TEXT = "model.language_model."
TOWER = {
    "patch_embedding": "model.vision_tower.patch_embedder.input_proj",
    "input_projection": "model.embed_vision.embedding_projection",
    **{f"block_{{i}}/{ours}": f"{BLOCK}{theirs}.linear" for ours, theirs in LAYERS.items()},
}
EMBEDDER = {
    "patch_embedding": "model.embed_vision.patch_dense",
    "input_projection": "model.embed_vision.multimodal_embedder.embedding_projection",
}


def names(model: "keras.Model") -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    encoder = getattr(model, "backbone", model).vision_encoder
    texts = peft.names(model, (TEXT,), heads=("lm_head",))
    vision = TOWER if isinstance(encoder, Gemma4VisionEncoder) else EMBEDDER
    found = {f"vision_encoder/{ours}": theirs for ours, theirs in vision.items()}
    return [{**texts[0], **found}, *texts[1:]]
