"""Names of Gemma's layers in transformers, under which PEFT keeps adapters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kmodels.models.common import peft
from kmodels.models.gemma.weights import huggingface

if TYPE_CHECKING:
    import keras

# The text models with their head and without it, then the text part of Gemma 3's multimodal ones in
# transformers 5, 4, and without their head.
PREFIXES = (*peft.PREFIXES, "model.language_model.", "language_model.model.", "language_model.")
HEADS = ("lm_head", "language_model.lm_head")


def names(model: "keras.Model") -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    norms = huggingface.norms(getattr(model, "backbone", model).config)
    return peft.names(model, PREFIXES, HEADS, {ours: theirs for theirs, ours in norms.items()})
