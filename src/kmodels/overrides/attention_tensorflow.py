"""Attention in float32 for TensorFlow on CPUs that truncate products in half precision."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.attention import attention
from kmodels.overrides._tensors_tensorflow import truncates, wide


def supports(call: OpCall) -> str | None:
    """Supports half precision that TensorFlow truncates."""
    return (
        None if truncates(tf.as_dtype(call.query.dtype)) else "TensorFlow rounds its own products"
    )


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
    """Runs the op's own body in float32 and rounds its result once."""
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    body: Any = attention.generic
    output = body(
        *(wide(x) for x in (query, key, value)),
        mask,
        causal=causal,
        window=window,
        segment_ids=segment_ids,
        block_ids=block_ids,
        scale=scale,
        soft_cap=soft_cap,
        dropout=dropout,
        seed=seed,
    )
    return tf.cast(output, query.dtype)
