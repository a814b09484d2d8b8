"""Images among the tokens of a text: their features instead of embeddings, and attention."""

from collections.abc import Callable
from typing import Any

from keras import ops

from kmodels.core.types import Tensor


def without_images(token_ids: Tensor, vision_mask: Tensor) -> Any:
    """Returns token ids (B, T) with 0 at image positions, given by the mask (B, T)."""
    return ops.where(ops.cast(vision_mask, "bool"), ops.zeros_like(token_ids), token_ids)


def insert(
    x: Tensor, features: Tensor, vision_mask: Tensor, move: Callable[[Any, Any], Any]
) -> Any:
    """Returns embeddings with the features of images at the positions of the mask.

    The n-th such place of a row gets the n-th feature of the row, whichever image it is of, as
    transformers' `masked_scatter` has it. Features beyond the last place are left out.

    Args:
        x: (B, T, D), embeddings.
        features: (B, M, D), of all images of a row, one behind the other.
        vision_mask: (B, T) int.
        move: (features, order (B, T)) to those features (B, T, D), see `Reordered`.

    Returns:
        (B, T, D).
    """
    number = ops.cumsum(ops.cast(vision_mask, "int32"), axis=1) - 1
    order = ops.cast(ops.maximum(number, 0), "int32")
    if (count := features.shape[1]) is not None:  # it is not known in a graph
        order = ops.minimum(order, count - 1)
    there = ops.expand_dims(ops.cast(vision_mask, "bool"), -1)
    return ops.where(there, ops.cast(move(features, order), x.dtype), x)


def block_ids(vision_mask: Tensor) -> Any:
    """Returns the number of the image that each token belongs to, and -1 for text.

    Tokens that follow one another are of one image: between two of them a text has the end of the
    first and the start of the second.

    Args:
        vision_mask: (B, T) int.

    Returns:
        (B, T) int32.
    """
    mask = ops.cast(ops.cast(vision_mask, "bool"), "int32")
    before = ops.pad(mask[:, :-1], ((0, 0), (1, 0)))
    number = ops.cumsum(mask * (1 - before), axis=1)
    return ops.cast(mask * number - 1, "int32")
