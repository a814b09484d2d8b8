"""The linear layers that an adapter is for."""

import re
from collections.abc import Sequence

import keras

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Dense

ALL = "all-linear"


def linear_layers(model: keras.Model) -> dict[str, Dense]:
    """Returns every linear layer of a model by its path, in the order of computation."""
    return {
        layer.path: layer for layer in keras_internals.sublayers(model) if isinstance(layer, Dense)
    }


def matches(path: str, target: str) -> bool:
    """Returns whether a target means a layer, by name, end of the path, or pattern."""
    if target == ALL or path == target or path.endswith(f"/{target}"):
        return True
    return re.fullmatch(target, path) is not None


def choose(model: keras.Model, targets: str | Sequence[str]) -> dict[str, Dense]:
    """Returns the layers that the targets mean.

    Args:
        model: where to look.
        targets: "all-linear", a name ("query"), the end of a path ("mlp/up"), a regular expression
            for whole paths (r"block_[0-3]/.*"), or several of those.

    Raises:
        InputError: for a target that means no layer.
    """
    layers = linear_layers(model)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for target in wanted:
        try:
            found = any(matches(path, target) for path in layers)
        except re.error as problem:
            raise InputError(f"LoRA target {target!r} is not a pattern: {problem}") from None
        if not found:
            ends = sorted({"/".join(path.split("/")[-2:]) for path in layers})
            raise InputError(
                f"LoRA target {target!r} is not a linear layer of this model; there are "
                f"{', '.join(ends)}; or give {ALL!r}"
            )
    return {
        path: layer
        for path, layer in layers.items()
        if any(matches(path, target) for target in wanted)
    }
