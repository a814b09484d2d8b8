"""Layer normalisation."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops._wide import mean, wide


@op
def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-6
) -> Tensor:
    """Normalises the last axis to mean 0 and variance 1, then scales and shifts it.

    Shapes: x (..., D), scale (D,), bias (D,) -> (..., D).
    Dtypes: floating; statistics, scale and shift in float32 (float64 for float64 input); the output
        has x's dtype.

    Args:
        x: the input.
        scale: multiplies the normalised values.
        bias: added at the end if given.
        epsilon: added to the variance.

    Parity: `torch.nn.functional.layer_norm`, `flax.linen.LayerNorm(use_fast_variance=False)`.
    Source: https://arxiv.org/abs/1607.06450
    """
    dtype = wide(x)
    y = ops.cast(x, dtype)
    y = ops.subtract(y, mean(y))
    variance = mean(ops.square(y))
    y = ops.multiply(ops.multiply(y, ops.rsqrt(variance + epsilon)), ops.cast(scale, dtype))
    if bias is not None:
        y = ops.add(y, ops.cast(bias, dtype))
    return ops.cast(y, ops.dtype(x))
