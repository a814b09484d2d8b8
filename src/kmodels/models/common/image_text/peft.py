"""Names of PEFT for the layers of a decoder with a vision tower, which are transformers'."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kmodels.models.common import peft
from kmodels.models.common.encoder import rules

if TYPE_CHECKING:
    import keras

# In transformers 5, and before; the tower of the published files is one level deeper.
PREFIXES = ("model.language_model.", "language_model.model.")
TOWERS = ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model.")


def names(model: "keras.Model") -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    texts = peft.names(model, PREFIXES, heads=("lm_head", "language_model.lm_head"))
    blocks = rules.names()
    towers: list[Mapping[str, str]] = [
        {f"vision_encoder/{ours}": f"{tower}{theirs}" for ours, theirs in blocks.items()}
        for tower in TOWERS
    ]
    return [{**texts[0], **towers[0]}, *texts[1:], *towers[1:]]
