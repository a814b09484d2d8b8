"""The cache where several tokens come in at once and rows accept different numbers of them.

Each row has places of its own: the token at position p stands in slot `p % size`. What a row
refuses is behind its last token, so that nothing sees it, and the next tokens are written over it.
"""

from typing import Any

from keras import ops

from kmodels.core.types import Tensor
from kmodels.generation.cache import Store, ring_size


class DraftView:
    """Some new tokens per row see what stands in front of them, and each other causally.

    A ring of a window has `ahead` slots more than that. So a slot that holds a refused token is
    taken for a place that is farther behind than any token sees.

    Args:
        starts: (B,) int32, position of the first new token.
        count: number of new tokens of each row, at most ahead + 1.
        slots: that the texts may take, `ahead` drafts included.
        ahead: largest number of tokens that may be refused.
    """

    def __init__(self, starts: Tensor, count: int, slots: int, ahead: int):
        self.slots = slots
        self.ahead = ahead
        self.positions = starts[:, None] + ops.arange(count, dtype="int32")  # (B, T)
        self._rings: dict[tuple[int, int | None], tuple[Any, Any, Any]] = {}

    def ring(self, window: int | None) -> tuple[Any, Any, Any]:
        """Returns the slots to write to (B, T), what is seen then (B, T, size), and its mask."""
        size = ring_size(self.slots, window, self.ahead)
        # A window that no text is longer than hides nothing.
        window = None if window is None or self.slots <= window else window
        if (size, window) not in self._rings:
            last = self.positions[:, -1:]
            held = last - ops.mod(last - ops.arange(size, dtype="int32"), size)  # (B, size)
            behind = self.positions[:, :, None] - held[:, None]
            seen = ops.logical_and(behind >= 0, held[:, None] >= 0)
            if window is not None:
                seen = ops.logical_and(seen, behind < window)
            # All layers get the same tensors, so that what is made of them serves them all.
            self._rings[size, window] = ops.mod(self.positions, size), seen, seen[:, None]
        return self._rings[size, window]

    def extend(
        self, store: Store, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Any, Any, dict]:
        """See `kmodels.generation.cache.LayerCache.extend`."""
        slots, _, mask = self.ring(window)
        key = store.scatter(2 * layer, slots, key)
        value = store.scatter(2 * layer + 1, slots, value)
        return key, value, {"mask": mask}  # (B, 1, T, size)
