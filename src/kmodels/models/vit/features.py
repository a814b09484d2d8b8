"""Intermediate features of a ViT as a Keras model of their own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from kmodels.core.errors import InputError


def feature_model(
    backbone: keras.Model,
    outputs: str | Sequence[str],
    more: Mapping[str, Callable[[Any], Any]] | None = None,
) -> keras.Model:
    """See `ViTBackbone.feature_model`.

    Args:
        backbone: whose graph it is.
        outputs: a name or several.
        more: further names, each with what makes that output of the sequence.

    Raises:
        InputError: for a name that is not there.
    """
    further = dict(more or {})
    known = [*further, "sequence_output", *backbone.stages]
    names = [outputs] if isinstance(outputs, str) else list(outputs)
    if not names or (unknown := [name for name in names if name not in known]):
        shown = ", ".join(map(repr, unknown)) if names else "nothing"
        raise InputError(f"feature_model got {shown}; choose from {', '.join(known)}")
    sequence = backbone.output

    def output(name: str) -> Any:
        if name in further:
            return further[name](sequence)
        return sequence if name == "sequence_output" else backbone.stages[name]

    found = {name: output(name) for name in names}
    only = found[outputs] if isinstance(outputs, str) else found
    return keras.Model(backbone.input, only, name="features")
