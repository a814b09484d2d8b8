"""Affine map for JAX on CPU: XLA multiplies two matrices faster than it contracts three axes."""

import jax
import keras
from jax import numpy as jnp

from kmodels.dispatch import Tensor, override
from kmodels.ops.dense import check_width, dense


def supports(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> str | None:
    """Three axes or more, on CPU, no model parallelism."""
    if len(x.shape) < 3:
        return "x is a matrix already"
    if jax.default_backend() != "cpu":
        return "only on CPU is a flat product faster"
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return "merging axes could gather a sharded tensor"
    return None


@override(dense, supports)
def dense_jax(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Merges the leading axes around the product; a batch axis that is sharded stays so."""
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    check_width(x, kernel)
    y = x.reshape(-1, x.shape[-1]) @ kernel
    y = y if bias is None else y + jnp.asarray(bias)
    return y.reshape(*x.shape[:-1], kernel.shape[1])
