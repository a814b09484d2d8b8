"""Arguments of a layer's call, parted into tensors and the rest."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core.types import Tensor


def tensors_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the tensors among arguments, and what puts others in their place: (args, kwargs)."""
    leaves = [*args, *kwargs.values()]
    places = [i for i, leaf in enumerate(leaves) if keras.ops.is_tensor(leaf)]

    def fill(*tensors: Tensor) -> tuple[list[Any], dict[str, Any]]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return filled[: len(args)], dict(zip(kwargs, filled[len(args) :], strict=True))

    return [leaves[place] for place in places], fill
