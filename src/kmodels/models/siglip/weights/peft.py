"""Names of the layers of SigLIP's text tower in transformers, under which PEFT keeps adapters."""

from collections.abc import Mapping, Sequence

import keras

from kmodels.models.common.encoder.huggingface import peft_names


def names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`: the head is a part of the tower."""
    tables = peft_names(model)
    query = "block_{i}/attention/query"
    return [{**table, "head": f"{table[query].partition('encoder.')[0]}head"} for table in tables]
