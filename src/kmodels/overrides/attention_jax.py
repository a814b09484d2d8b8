"""Attention for JAX: `jax.nn.dot_product_attention`."""

import jax
import keras
from jax import numpy as jnp

from kmodels.dispatch import Tensor, override
from kmodels.ops.attention import allowed_pairs, attention, check_attention


@override(attention)
def attention_jax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> Tensor:
    """x."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    aligned = causal and mask is None and window is None and query.shape[1] == key.shape[1]
    allowed = None if aligned else allowed_pairs(query, key, mask, causal, window)
    output = jax.nn.dot_product_attention(
        query, key, value, mask=allowed, scale=scale, is_causal=aligned
    )
    if mask is not None:
        some = allowed.any(-1, keepdims=True).swapaxes(1, 2)
        output = jnp.where(some, output, 0)
    return output
