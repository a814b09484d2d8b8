"""Attention for TensorFlow with a custom gradient, which keeps only the attention weights.

With a causal mask, one block of queries is computed at a time, without the keys that the mask hides
from the whole block. Grouped heads need no batched products.
"""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.attention import (
    MASKED,
    allowed_pairs,
    attention,
    block_slices,
    check_attention,
    check_ids,
    near_pairs,
)
from kmodels.overrides import dropout_tensorflow
from kmodels.overrides._tensors_tensorflow import later, product, static_shape, truncates, wide

# Queries of a block: measured between 64 and 256.
SIZE = 128
# Tokens up to which the weights are kept for the backward pass.
KEPT = 1024


def supports(call: OpCall) -> str | None:
    """Supports the calls of `by_blocks`, and every call in a dtype that TensorFlow truncates."""
    return None if truncates(tf.as_dtype(call.query.dtype)) else by_blocks(call)


def by_blocks(call: OpCall) -> str | None:
    """Returns why a call is not computed by blocks (a clause), or None."""
    drops = call.dropout and call.seed is not None
    if not call.causal and not drops and tf.as_dtype(call.query.dtype).size > 2:
        return "in float32 only a causal mask and dropout were measured to make it faster"
    if call.soft_cap is not None:
        return "the backward pass by blocks has no soft cap"
    if call.block_ids is not None:
        return "it leaves out the keys ahead, which image blocks see"
    if drops and (reason := dropout_tensorflow.unsupported(call.query, call.dropout, call.seed)):
        return reason
    if None in (*call.query.shape[1:], *call.key.shape[1:]):
        return "lengths are not known"
    if call.query.shape[1] * call.key.shape[1] > KEPT**2:
        return "the op's own body goes through long texts in blocks, and keeps no weights"
    if tf.config.list_physical_devices("GPU"):
        return "only on CPU were blocks measured to be faster"
    return None


@dataclass(frozen=True)
class _Sizes:
    """The sizes that are known when the graph is made."""

    length: int  # T
    keys: int  # S
    groups: int  # K
    shared: int  # queries at a position that share a key head, G
    causal: bool
    window: int | None
    scale: float


@override(attention, supports)
def attention_tensorflow(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    mask: tf.Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: tf.Tensor | None = None,
    block_ids: tf.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | tf.Tensor | None = None,
) -> tf.Tensor:
    """Keeps the attention weights for the backward pass, with dropout also a byte for each."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    if truncates(query.dtype):
        op: Any = attention
        options = {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}
        options |= {"segment_ids": segment_ids, "block_ids": block_ids}
        options |= {"dropout": dropout, "seed": seed}
        if by_blocks(op.bind(query, key, value, mask, **options)):
            inputs = (wide(x) for x in (query, key, value))
            return tf.cast(op.generic(*inputs, mask, **options), query.dtype)
    _, length, heads, head_dim = static_shape(query)
    keys, groups = static_shape(key)[1:3]
    factor = head_dim**-0.5 if scale is None else scale
    sizes = _Sizes(length, keys, groups, heads // groups, causal, window, factor)
    pairs = allowed_pairs(query, key, mask, False, None)
    segments = None if segment_ids is None else ops.convert_to_tensor(segment_ids)
    hides = causal or window is not None
    cut = block_slices(length, keys, causal, window, SIZE if hides else length)
    stays, share = None, 1.0
    if dropout and seed is not None:
        shape = (tf.shape(query)[0], groups, length * sizes.shared, keys)
        stays, share = dropout_tensorflow.keep(seed, shape, dropout)

    def dropped(x: tf.Tensor, stays: tf.Tensor | None, place: tuple[slice, slice]) -> tf.Tensor:
        return x if stays is None else x * tf.cast(stays[:, :, place[0], place[1]], x.dtype)

    def scaled(x: tf.Tensor) -> tf.Tensor:
        # The factors of dropout, which the weights themselves could not hold in bfloat16.
        return x if stays is None else tf.cast(wide(x) * share, x.dtype)

    @tf.custom_gradient
    def products(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Any:
        query, key, value = _rows(query, sizes), _heads_first(key), _heads_first(value)
        saved, outputs = [], []
        for block in cut:
            rows, seen = _places(block, sizes)
            scores = product(query[:, :, rows], key[:, :, seen], transpose_b=True)
            saved.append(tf.cast(_softmax(scores, pairs, segments, block, sizes), value.dtype))
            weights = dropped(saved[-1], stays, (rows, seen))
            outputs.append(scaled(product(weights, value[:, :, seen])))

        def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            drawn = [] if stays is None else [stays]
            found = later(gradient, query, key, value, *saved, *drawn)
            query_, key_, value_, kept = *found[:3], found[3 : 3 + len(saved)]
            stays_ = None if stays is None else found[-1]
            gradient = _rows(gradient, sizes)
            for_query, for_key, for_value = [], [], []
            for block, weights in zip(cut, kept, strict=True):
                rows, seen = _places(block, sizes)
                part = gradient[:, :, rows]
                rest = [[0, 0], [0, 0], [seen.start, keys - seen.stop], [0, 0]]
                full, place = wide(weights), (rows, seen)
                left = dropped(weights, stays_, place)
                own = scaled(product(left, part, transpose_a=True))
                for_value.append(tf.pad(own, rest))
                slope = wide(product(part, value_[:, :, seen], transpose_b=True))
                slope = dropped(slope, stays_, place) * share
                slope = full * (slope - tf.reduce_sum(slope * full, axis=-1, keepdims=True))
                slope = tf.cast(slope * factor, weights.dtype)
                for_query.append(product(slope, key_[:, :, seen]))
                own = product(slope, query_[:, :, rows], transpose_a=True)
                for_key.append(tf.pad(own, rest))
            keys_slope, values_slope = (_heads_first(tf.add_n(x)) for x in (for_key, for_value))
            return _back(tf.concat(for_query, axis=2), sizes), keys_slope, values_slope

        return _back(tf.concat(outputs, axis=2), sizes), backward

    return products(query, key, value)


def _rows(x: tf.Tensor, sizes: _Sizes) -> tf.Tensor:
    """(B, T, K * G, H) -> (B, K, T * G, H): the queries that share a key lie together."""
    split = tf.reshape(x, (-1, sizes.length, sizes.groups, sizes.shared, x.shape[-1]))
    rows = sizes.length * sizes.shared
    return tf.reshape(tf.transpose(split, (0, 2, 1, 3, 4)), (-1, sizes.groups, rows, x.shape[-1]))


def _back(x: tf.Tensor, sizes: _Sizes) -> tf.Tensor:
    """(B, K, T * G, H) -> (B, T, K * G, H)."""
    split = tf.reshape(x, (-1, sizes.groups, sizes.length, sizes.shared, x.shape[-1]))
    heads = sizes.groups * sizes.shared
    return tf.reshape(tf.transpose(split, (0, 2, 1, 3, 4)), (-1, sizes.length, heads, x.shape[-1]))


def _heads_first(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, (0, 2, 1, 3))


def _places(block: tuple[slice, slice], sizes: _Sizes) -> tuple[slice, slice]:
    """Returns rows of the queries and of the keys."""
    queries, seen = block
    return slice(queries.start * sizes.shared, queries.stop * sizes.shared), seen


def _softmax(
    scores: tf.Tensor,
    pairs: tf.Tensor | None,
    segments: tf.Tensor | None,
    block: tuple[slice, slice],
    sizes: _Sizes,
) -> tf.Tensor:
    """Returns attention weights of a block of scores (B, K, t * G, s), in float32 at least."""
    queries, seen = block
    offset = sizes.keys - sizes.length
    allowed = near_pairs(queries, seen, offset, sizes.causal, sizes.window)
    full = wide(scores) * sizes.scale
    if not allowed.all():
        # A number that is added: TensorFlow selects slowly on a CPU.
        hidden = np.repeat(np.where(allowed, 0.0, MASKED), sizes.shared, axis=0)
        full += tf.constant(hidden, full.dtype)
    same = None
    if segments is not None:
        own = segments[:, queries.start + offset : queries.stop + offset]
        same = tf.equal(own[:, :, None], segments[:, None, seen.start : seen.stop])
        other = tf.repeat(tf.cast(tf.logical_not(same), full.dtype), sizes.shared, axis=1)
        full += (other * MASKED)[:, None]
    if pairs is None:
        return tf.nn.softmax(full)
    # (B or 1, N or 1, T or 1, S or 1) -> (B or 1, K or 1, t, G, s), then as the scores lie
    split = (sizes.groups, sizes.shared) if static_shape(pairs)[1] > 1 else (1, 1)
    whole = tf.broadcast_to(pairs, (tf.shape(pairs)[0], pairs.shape[1], sizes.length, sizes.keys))
    part = whole[:, :, queries.start : queries.stop, seen.start : seen.stop] & allowed
    if same is not None:
        part &= same[:, None]
    here, there = queries.stop - queries.start, seen.stop - seen.start
    part = tf.reshape(part, (-1, *split, here, there))
    part = tf.repeat(tf.transpose(part, (0, 1, 3, 2, 4)), sizes.shared // split[1], axis=3)
    part = tf.reshape(part, (-1, split[0], here * sizes.shared, there))
    weights = tf.nn.softmax(tf.where(part, full, tf.constant(MASKED, full.dtype)))
    # A query that sees nothing has uniform weights here; they become zero.
    return weights * tf.cast(tf.reduce_any(part, axis=-1, keepdims=True), full.dtype)
