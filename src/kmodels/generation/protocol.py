"""keras-hub's protocol between samplers and models: one step per call, one array as the cache."""

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
from keras import ops

from kmodels.core.types import Tensor
from kmodels.generation.sampler import Sampler
from kmodels.generation.stop import ended


class DenseCache:
    """The cache of one block: its part of an array, and the place of the new tokens.

    Args:
        content: (B, 2, S, K, H), keys and values; K and H are at least the block's own.
        index: number of the first new token.

    Attributes:
        extended: the last result of `extend`, for the blocks that share it.
    """

    extended: tuple[Any, Any, dict]

    def __init__(self, content: Tensor, index: Tensor | int):
        self.content = content
        self.index = index

    def extend(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Any, Any, dict]:
        """Writes the new keys and values; returns all of them, and the mask of the queries."""
        start, slots = [0, self.index, 0, 0], self.content.shape[2]
        _, new, heads, width = key.shape
        key = ops.slice_update(self.content[:, 0], start, ops.cast(key, self.content.dtype))
        value = ops.slice_update(self.content[:, 1], start, ops.cast(value, self.content.dtype))
        self.content = ops.stack([key, value], axis=1)
        query = ops.expand_dims(self.index + ops.arange(new, dtype="int32"), 1)
        behind = query - ops.expand_dims(ops.arange(slots, dtype="int32"), 0)
        seen = behind >= 0
        if window is not None:
            seen = ops.logical_and(seen, behind < window)
        key, value = key[:, :, :heads, :width], value[:, :, :heads, :width]
        self.extended = key, value, {"mask": ops.expand_dims(ops.expand_dims(seen, 0), 0)}
        return self.extended


def call_with_cache(
    backbone: keras.Model, token_ids: Tensor, cache: Tensor, cache_update_index: Tensor | int
) -> tuple[Any, Any, Any]:
    """Returns logits and hidden states of new tokens, and the cache with them.

    Args:
        backbone: with `extend`, `cache_numbers` and `token_embedding.logits`.
        token_ids: (B, T) int, the new tokens.
        cache: (B, caches, 2, S, K, H), see `empty_cache`; a block uses the first of K and H.
        cache_update_index: place of the first new token.

    Returns:
        logits (B, T, V), hidden states (B, T, D), cache.
    """
    index = keras.ops.cast(cache_update_index, "int32")
    token_ids = keras.ops.convert_to_tensor(token_ids, dtype="int32")
    positions = index + keras.ops.arange(token_ids.shape[1], dtype="int32")
    caches = [DenseCache(cache[:, number], index) for number in range(cache.shape[1])]
    hidden = backbone.extend(token_ids, positions, [caches[n] for n in backbone.cache_numbers])
    cache = keras.ops.stack([one.content for one in caches], axis=1)
    return backbone.token_embedding.logits(hidden), hidden, cache


def empty_cache(backbone: keras.Model, batch: int, slots: int) -> Any:
    """Returns a cache for `batch` rows of up to `slots` tokens, in the compute dtype.

    It has the heads and the width of the block with the most, and one entry per block that
    computes keys and values.
    """
    heads, width = (max(sizes) for sizes in zip(*backbone.cache_shapes, strict=True))
    shape = (batch, len(backbone.cache_shapes), 2, slots, heads, width)
    return keras.ops.zeros(shape, dtype=backbone.dtype_policy.compute_dtype)


def continue_by_protocol(
    model: keras.Model,
    prompts: list[list[int]],
    limits: list[int],
    sampler: Sampler,
    stop: Collection[int],
) -> list[list[int]]:
    """Continues prompts by calling the sampler itself, not compiled.

    Args:
        model: with `call_with_cache` and `_build_cache`.
        prompts: token ids, at least one each.
        limits: limits of each prompt and its continuation together.
        sampler: is called with `next`, the prompts, a filled cache and its hidden states.
        stop: ids that end a row.

    Returns:
        The prompts with their continuations.
    """
    length = max([*limits, *(len(prompt) for prompt in prompts)])
    ids, mask = np.zeros((len(prompts), length), "int32"), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    hidden, cache = model._build_cache(keras.ops.convert_to_tensor(ids))

    def following(rows: Tensor, cache: Tensor, index: Tensor | int) -> tuple[Any, Any, Any]:
        new = rows[:, index - 1 : index]
        logits, hidden, cache = model.call_with_cache(new, cache, index - 1)
        return logits[:, 0], hidden[:, 0], cache

    continued = sampler(
        next=following,
        prompt=ids,
        cache=cache,
        index=int(mask.sum(1).min()),
        mask=mask,
        stop_token_ids=list(stop) or None,
        hidden_states=keras.ops.cast(hidden, "float32"),
        model=model,
    )
    return [
        _until(row.tolist(), len(prompt), limit, stop)
        for row, prompt, limit in zip(
            np.asarray(keras.ops.convert_to_numpy(continued)), prompts, limits, strict=True
        )
    ]


def _until(row: list[int], start: int, limit: int, stop: Collection[int]) -> list[int]:
    """Returns the row up to its limit, or to the first token behind the prompt that ends it."""
    limit = max(start, limit)
    for place in range(start, limit):
        if ended(stop, row[start : place + 1]):
            return row[: place + 1]
    return row[:limit]
