"""The KV cache in rings, and the passes of generation that read and extend it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import keras
from keras import ops

from kmodels.core.types import Tensor
from kmodels.generation.sampler import Sampler


class Store(Protocol):
    """The storage of all rings: the keys of cache i are at 2 i, its values at 2 i + 1.

    After them comes a ring of the tokens themselves, if the sampler reads them.
    """

    def fill(self, ring: int, content: Tensor) -> None:
        """Takes the whole of a ring, (B, slots, ...)."""
        ...

    def write(self, ring: int, slot: Tensor, new: Tensor) -> Any:
        """Writes (B, 1, ...) to a slot, a scalar tensor; returns the whole."""
        ...

    def scatter(self, ring: int, slots: Tensor, new: Tensor) -> Any:
        """Writes (B, T, ...) to the slots (B, T) int32 of each row; returns the whole."""
        ...


def ring_size(slots: int, window: int | None, ahead: int = 0) -> int:
    """Returns the number of slots of a layer with this window, for texts of up to `slots` tokens.

    Up to `ahead` drafts may be written and refused; they must not replace tokens in the window.
    """
    return slots if window is None else min(slots, window + ahead)


def ring_shapes(
    backbone: keras.Model, batch: int, slots: int, ahead: int = 0
) -> list[tuple[int, ...]]:
    """Returns shapes of all keys and values, in the order of `Store`.

    Blocks that use the keys and values of another have none.
    """
    return [
        (batch, ring_size(slots, window, ahead), *shape)
        for window, shape in zip(backbone.cache_windows, backbone.cache_shapes, strict=True)
        for _ in range(2)
    ]


class PromptView:
    """The prompts, `lengths` (B,) int32 tokens each, come in and see themselves.

    The end of each stays in the rings; with `ahead` drafts, rows end at different places.
    """

    def __init__(self, lengths: Tensor, slots: int, ahead: int = 0):
        self.lengths = lengths
        self.slots = slots
        self.ahead = ahead

    def keep(self, x: Tensor, size: int) -> Any:
        """Returns the ring (B, size, ...) of values (B, P, ...); empty slots hold any value."""
        batch, prompt = x.shape[:2]
        end = self.lengths[:, None] if self.ahead else prompt
        behind = ops.mod(end - 1 - ops.arange(size, dtype="int32"), size)
        position = ops.maximum(self.lengths[:, None] - 1 - behind, 0)
        rows = ops.arange(batch, dtype="int32")[:, None] * prompt
        # One index per token: a gather along the axis would need one per number.
        return ops.take(ops.reshape(x, (batch * prompt, *x.shape[2:])), rows + position, axis=0)

    def extend(
        self, store: Store, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Any, Any, dict]:
        """See `LayerCache.extend`."""
        size = ring_size(self.slots, window, self.ahead)
        store.fill(2 * layer, self.keep(key, size))
        store.fill(2 * layer + 1, self.keep(value, size))
        if window is not None and key.shape[1] <= window:
            window = None
        return key, value, {"causal": True, "window": window}


class StepView:
    """One new token per row, which attends to its prompt and the tokens generated so far.

    It has the number `step` from 0, a scalar tensor, behind prompts of `lengths` (B,) int32 tokens
    that were padded to `prompt`.
    """

    def __init__(self, lengths: Tensor, prompt: int, slots: int, step: Tensor):
        self.slots = slots
        self.place = prompt + step
        self.positions = lengths[:, None] + step  # (B, 1)
        self._rings: dict[int, tuple[Any, Any, Any]] = {}

    def ring(self, size: int) -> tuple[Any, Any, Any]:
        """Returns the slot to write to, the slots that hold a token then, (B, size), and a mask."""
        if size not in self._rings:
            behind = (self.place - ops.arange(size, dtype="int32")) % size
            filled = behind <= self.positions
            # All layers get the same tensor, so that what an override makes of it serves them all.
            self._rings[size] = self.place % size, filled, filled[:, None, None]
        return self._rings[size]

    def extend(
        self, store: Store, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Any, Any, dict]:
        """See `LayerCache.extend`."""
        size = ring_size(self.slots, window)
        slot, _, mask = self.ring(size)
        key = store.write(2 * layer, slot, key)
        value = store.write(2 * layer + 1, slot, value)
        return key, value, {"mask": mask}  # (B, 1, 1, size)


class View(Protocol):
    """The part of the cache that one pass reads, and its masks."""

    def extend(
        self, store: Store, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Any, Any, dict]:
        """See `LayerCache.extend`."""
        ...


class LayerCache:
    """The cache of one block, see `kmodels.models.blocks.decoder_block.DecoderBlock`.

    Attributes:
        extended: the last result of `extend`, for the blocks that share it.
    """

    extended: tuple[Any, Any, dict]

    def __init__(self, store: Store, layer: int, view: View):
        self.store = store
        self.layer = layer
        self.view = view

    def extend(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Any, Any, dict]:
        """Stores new keys and values; returns those to attend to, and arguments of attention."""
        self.extended = self.view.extend(self.store, self.layer, key, value, window)
        return self.extended


class DraftView:
    """Several new tokens per row attend to all earlier tokens, and to each other causally.

    Tokens begin at the positions `starts` (B,) int32; each row has `count` of them, at most ahead +
    1.

    A ring of a window has `ahead` slots more than that. So a slot that holds a refused token is
    taken for a place that is farther behind than any token attends to.
    """

    def __init__(self, starts: Tensor, count: int, slots: int, ahead: int):
        self.slots = slots
        self.ahead = ahead
        self.positions = starts[:, None] + ops.arange(count, dtype="int32")  # (B, T)
        self._rings: dict[tuple[int, int | None], tuple[Any, Any, Any]] = {}

    def ring(self, window: int | None) -> tuple[Any, Any, Any]:
        """Returns the slots to write to (B, T), the visible slots (B, T, size), and a mask."""
        size = ring_size(self.slots, window, self.ahead)
        # A window that no text is longer than hides nothing.
        window = None if window is None or self.slots <= window else window
        if (size, window) not in self._rings:
            last = self.positions[:, -1:]
            tokens = last - ops.mod(last - ops.arange(size, dtype="int32"), size)  # (B, size)
            behind = self.positions[:, :, None] - tokens[:, None]
            seen = ops.logical_and(behind >= 0, tokens[:, None] >= 0)
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


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of one batch shape, which each backend compiles.

    Draws are numbers in [0, 1), one for each token that is chosen.

    Args:
        backbone: with `extend`, `cache_shapes`, `cache_windows`, `cache_numbers` and
            `token_embedding.logits`.
        sampler: chooses the tokens.
        batch: B, the number of texts.
        prompt: P, the length that prompts are padded to.
        slots: number of tokens of prompt and continuation together.
        ahead: largest number of drafts that come in at once; 0 without drafts.
    """

    backbone: keras.Model
    sampler: Sampler
    batch: int
    prompt: int
    slots: int
    ahead: int = 0

    def first_token(
        self,
        store: Store,
        token_ids: Tensor,
        lengths: Tensor,
        draws: Tensor,
        images: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Runs the prompts through the model in one pass and chooses the token behind each.

        Prompts `token_ids` (B, P) int32 are padded on the right; images go by the names of the
        model's inputs. Returns (B,) int32.
        """
        view = PromptView(lengths, self.slots, self.ahead)
        seen = {} if images is None else {"images": images}
        hidden = self.backbone.extend(token_ids, None, self._caches(store, view), **seen)
        last = ops.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
        history = None
        if self.sampler.looks_back:
            store.fill(self._tokens_ring, view.keep(token_ids, self.slots))
            # Padding stands for the first token, which the row holds anyway.
            is_token = ops.arange(token_ids.shape[1], dtype="int32")[None] < lengths[:, None]
            history = ops.where(is_token, token_ids, token_ids[:, :1])
        return self._chosen(last, history, draws)

    def next_token(
        self, store: Store, tokens: Tensor, step: Any, lengths: Tensor, draws: Tensor
    ) -> Any:
        """Runs one new token per row through the model and chooses the one behind it.

        Tokens (B,) have the number `step`, from 0, behind prompts of `lengths` (B,) tokens.
        """
        view = StepView(lengths, self.prompt, self.slots, step)
        tokens = tokens[:, None]
        hidden = self.backbone.extend(tokens, view.positions, self._caches(store, view))
        history = None
        if self.sampler.looks_back:
            slot, filled, _ = view.ring(self.slots)
            history = store.write(self._tokens_ring, slot, tokens)
            history = ops.where(filled, history, tokens)
        return self._chosen(hidden[:, 0], history, draws)

    def next_tokens(self, store: Store, tokens: Tensor, starts: Tensor, draws: Tensor) -> Any:
        """Runs some new tokens per row, the last one and drafts, and chooses the one behind each.

        Tokens (B, T) begin at the positions `starts` (B,), and replace refused ones in the cache;
        draws are (B, T) too.
        """
        batch, count = tokens.shape
        view = DraftView(starts, count, self.slots, self.ahead)
        hidden = self.backbone.extend(tokens, view.positions, self._caches(store, view))
        history = None
        if self.sampler.looks_back:
            places, seen, _ = view.ring(None)
            history = store.scatter(self._tokens_ring, places, tokens)
            history = ops.where(seen, history[:, None], tokens[:, :, None])
            history = ops.reshape(history, (batch * count, self.slots))
        hidden = ops.reshape(hidden, (batch * count, -1))
        following = self._chosen(hidden, history, ops.reshape(draws, (-1,)))
        return ops.reshape(following, (batch, count))

    @property
    def _tokens_ring(self) -> int:
        return 2 * len(self.backbone.cache_shapes)

    def _caches(self, store: Store, view: View) -> list[LayerCache]:
        """Returns the cache of each block; some blocks may have the same one."""
        numbers = range(len(self.backbone.cache_shapes))
        by_number = [LayerCache(store, number, view) for number in numbers]
        return [by_number[number] for number in self.backbone.cache_numbers]

    def _chosen(self, hidden: Tensor, history: Tensor | None, draws: Tensor) -> Any:
        logits = self.backbone.token_embedding.logits(hidden)
        return self.sampler.choose(logits, history, draws)
