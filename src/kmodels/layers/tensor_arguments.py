"""Arguments of a layer's call, parted into tensors and the rest."""

from collections.abc import Callable
from typing import Any

import keras

from kmodels.core.types import Tensor


def tensors_apart(args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the tensors in arguments, and a function of other tensors that gives (args, kwargs).

    Tensors may be nested in tuples, lists and dictionaries.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if keras.ops.is_tensor(leaf)]

    def fill(*tensors: Tensor) -> tuple[tuple, dict[str, Any]]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return keras.tree.pack_sequence_as((args, kwargs), filled)

    return [leaves[place] for place in places], fill
