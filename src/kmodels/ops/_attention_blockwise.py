"""Attention to long texts, a block of queries after the other.

A block holds the scores of its queries with all keys that they may see; its softmax is whole, so
none has to run along. What a backward pass needs of a block is computed again from the inputs, so
that nothing of the size of query times key stands anywhere.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops

from kmodels.core.dispatch import backend_module
from kmodels.core.types import Tensor
from kmodels.ops._attention_cuts import Block, cuts
from kmodels.ops._attention_parts import Hidden, pairs, products

# Pairs of query and key from which blocks pay: one of a batch has 2 MB of scores for each head.
PAIRS = 2**19
# Queries of a block: at most the first, at least the second, and as many as have so many scores.
MOST, LEAST, SCORES = 256, 64, 2**20
WORD = 2**32


class RecomputeBackend(Protocol):
    """Work in blocks of which a backward pass keeps the inputs alone.

    `keras.remat` would do for JAX. torch's is not allowed inside of `torch.func`, TensorFlow's has
    no second derivatives, and both add up one gradient per block at the end.
    """

    def blockwise(
        self,
        function: Callable[..., Any],
        blocks: Sequence[Block],
        tensors: tuple[Any, Any, Any],
        others: Any,
    ) -> Any:
        """Returns the results (B, size, ...) of all blocks, joined.

        Args:
            function: takes start and low, numbers or scalar tensors; size and width, numbers; the
                tensors; and the others.
            blocks: blocks in the order of their queries.
            tensors: what gradients are wanted of.
            others: further tensors in lists, tuples and dictionaries, or None.
        """
        ...


_native = backend_module("kmodels.ops._recompute", RecomputeBackend)


def pays(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Returns whether the lengths are known, and large enough for blocks."""
    length, keys = query.shape[1], key.shape[1]
    if not isinstance(length, int) or not isinstance(keys, int):
        return False
    if length <= MOST or length * keys <= PAIRS or isinstance(query, keras.KerasTensor):
        return False
    return mask is None or None not in mask.shape[-2:]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Hidden,
    words: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
    rate: float,
) -> Any:
    """See `kmodels.ops.attention`; `words` are two numbers that say what is dropped, or `None`."""
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    length, keys = query.shape[1], key.shape[1]
    *given, causal, window = hidden
    given = [None if x is None else ops.convert_to_tensor(x) for x in given]
    if given[0] is not None:
        axes = len(given[0].shape)
        given[0] = ops.reshape(given[0], (1,) * (4 - axes) + tuple(ops.shape(given[0])))

    def block(
        start: Tensor,
        low: Tensor,
        size: int,
        width: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        others: tuple[Any, ...],
    ) -> Any:
        mask, segment_ids, block_ids, words = others
        first = start + (keys - length)

        def of_queries(x: Tensor | None, start: Tensor, axis: int = 1) -> Any:
            return None if x is None else cut(x, start, size, axis)

        def of_keys(x: Tensor | None, axis: int = 1) -> Any:
            return None if x is None else cut(x, low, width, axis)

        if mask is not None:
            mask = mask if mask.shape[2] == 1 else of_queries(mask, start, 2)
            mask = mask if mask.shape[3] == 1 else of_keys(mask, 3)
        here = Hidden(mask, of_keys(segment_ids), of_keys(block_ids), causal, window)
        own = of_queries(segment_ids, first), of_queries(block_ids, first)
        allowed = pairs(here, *own, (first, size), (low, width))

        def drop(weights: Tensor) -> Any:
            return weights if words is None else dropped(weights, words, rate, start, low, keys)

        return products(
            of_queries(query, start),
            of_keys(key),
            of_keys(value),
            allowed,
            mask is not None,
            scale,
            soft_cap,
            drop,
        )

    ahead = not causal or hidden.block_ids is not None
    size = max(LEAST, min(MOST, SCORES // keys))
    found = cuts(length, keys, ahead, causal, window, size)
    return _native.blockwise(block, found, (query, key, value), (*given, words))


def cut(x: Tensor, start: Tensor | int, size: int, axis: int) -> Any:
    """Returns `size` places of an axis from a number or a scalar tensor on."""
    if size == x.shape[axis]:
        return x
    if isinstance(start, int):
        return x[(slice(None),) * axis + (slice(start, start + size),)]
    begin: list[Tensor | int] = [0] * len(x.shape)
    shape = list(ops.shape(x))
    begin[axis], shape[axis] = start, size
    return ops.slice(x, begin, shape)


def words(seed: keras.random.SeedGenerator | Tensor | int) -> Any:
    """Returns two whole numbers (2,) of a seed; a generator moves on."""
    if isinstance(seed, keras.random.SeedGenerator):
        return ops.cast(seed.next(), "int32")  # type: ignore[attr-defined]
    if isinstance(seed, int):
        seed = np.array([_signed(seed), 0], "int32")
    return ops.cast(seed, "int32")


def dropped(
    weights: Tensor, words: Tensor, rate: float, start: Tensor, low: Tensor, keys: int
) -> Any:
    """Drops weights (B, ..., t, s) by a hash of their places, the same whenever it is computed."""
    *outer, size, width = ops.shape(weights)
    rows = 1
    for extent in outer:
        rows = rows * extent
    row = ops.reshape(ops.arange(rows, dtype="int32"), (*outer, 1, 1))
    row = mixed(ops.bitwise_xor(row, words[0]))
    row = mixed(row + ops.expand_dims(ops.arange(size, dtype="int32") + start, 1) + words[1])
    place = ops.arange(width, dtype="int32") + low
    bits = mixed(ops.bitwise_xor(row, mixed(place)))
    stays = bits >= min(round(rate * WORD), WORD - 1) - WORD // 2
    kept = ops.cast(stays, ops.dtype(weights))
    return ops.cast(weights * kept * (1.0 / (1.0 - rate)), ops.dtype(weights))


def mixed(x: Tensor) -> Any:
    """Returns a bijection of 32-bit words that changes half of the bits for each that changes.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018), the function lowbias32.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        # The shift of a signed number copies its sign, which the mask takes off again.
        high = ops.bitwise_and(ops.right_shift(x, shift), (1 << (32 - shift)) - 1)
        x = ops.bitwise_xor(x, high) * _signed(factor)
    return x


def _signed(word: int) -> int:
    """Returns the 32-bit number with these bits."""
    return (word + WORD // 2) % WORD - WORD // 2
