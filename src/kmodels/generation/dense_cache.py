"""A cache of keys and values as one array, as keras-hub's `call_with_cache` takes it."""

from typing import Any

from keras import ops

from kmodels.core.types import Tensor


class DenseCache:
    """The cache that one block is given: its part of an array, and the new tokens' place.

    Args:
        held: (B, 2, S, K, H), keys and values; K and H are at least the block's own.
        index: number of the first new token.

    Attributes:
        extended: what `extend` returned, for the blocks that share it.
    """

    extended: tuple[Any, Any, dict]

    def __init__(self, held: Tensor, index: Tensor | int):
        self.held = held
        self.index = index

    def extend(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Any, Any, dict]:
        """Writes the new keys and values; returns all of them, and which each query sees."""
        start, slots = [0, self.index, 0, 0], self.held.shape[2]
        _, new, heads, width = key.shape
        key = ops.slice_update(self.held[:, 0], start, ops.cast(key, self.held.dtype))
        value = ops.slice_update(self.held[:, 1], start, ops.cast(value, self.held.dtype))
        self.held = ops.stack([key, value], axis=1)
        query = ops.expand_dims(self.index + ops.arange(new, dtype="int32"), 1)
        behind = query - ops.expand_dims(ops.arange(slots, dtype="int32"), 0)
        seen = behind >= 0
        if window is not None:
            seen = ops.logical_and(seen, behind < window)
        key, value = key[:, :, :heads, :width], value[:, :, :heads, :width]
        self.extended = key, value, {"mask": ops.expand_dims(ops.expand_dims(seen, 0), 0)}
        return self.extended
