"""Keys and values of earlier tokens.

Prompts of unequal length lie in the first slots, padded on the right; token j that is generated
lies in slot prompt + j of every row, whatever its position, so that all rows write to the same
slot. Which slots hold something, and at which position, follows from the lengths.
"""

from typing import Any, Protocol

from keras import ops


class Store(Protocol):
    """Where a backend keeps keys and values: (B, slots, K, H) twice per layer."""

    def write(self, layer: int, slot: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """Writes (B, T, K, H) from `slot` on; returns the whole of that layer."""
        ...


class PromptView:
    """The prompt itself is all there is to see."""

    slot = 0

    def seen(self, key: Any, value: Any, whole: Any, window: int | None) -> tuple[Any, Any, dict]:
        """Keys, values and what a query may see of them."""
        if window is not None and key.shape[1] is not None and key.shape[1] <= window:
            window = None
        return key, value, {"causal": True, "window": window}


class StepView:
    """One new token per row sees its prompt and what was generated.

    Args:
        lengths: (B,) int32, tokens of each prompt.
        prompt: slots that prompts take.
        slots: all slots.
        step: number of the token that comes in, from 0; a scalar tensor.
    """

    def __init__(self, lengths: Any, prompt: int, slots: int, step: Any):
        self.slot = prompt + step
        self.position = lengths[:, None] + step  # (B, 1)
        index = ops.arange(slots, dtype="int32")[None]
        later = index >= prompt
        self._positions = ops.where(later, lengths[:, None] + index - prompt, index)  # (B, slots)
        self.filled = ops.where(later, index <= self.slot, index < lengths[:, None])
        self._masks: dict[int | None, Any] = {}

    def seen(self, key: Any, value: Any, whole: Any, window: int | None) -> tuple[Any, Any, dict]:
        """Keys, values and what a query may see of them."""
        if window not in self._masks:
            mask = self.filled
            if window is not None:
                near = self.position - self._positions < window
                mask = ops.logical_and(mask, near)
            self._masks[window] = mask[:, None, None]  # (B, 1, 1, slots)
        return (*whole, {"mask": self._masks[window]})


class LayerCache:
    """What one block is handed; see `kmodels.models.gemma.layers.GemmaBlock`."""

    def __init__(self, store: Store, layer: int, view: PromptView | StepView):
        self.store = store
        self.layer = layer
        self.view = view

    def extend(self, key: Any, value: Any, window: int | None) -> tuple[Any, Any, dict]:
        """Keeps the new keys and values; returns all that queries see, and how."""
        whole = self.store.write(self.layer, self.view.slot, key, value)
        return self.view.seen(key, value, whole, window)
