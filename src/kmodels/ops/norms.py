"""Layer normalization and root mean square normalization."""

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


@op
def rms_norm(
    x: Tensor, scale: Tensor | None, *, epsilon: float = 1e-6, offset: float = 1.0
) -> Tensor:
    """Divides the last axis by its root mean square and multiplies by `offset + scale`.

    Shapes: x (..., D), scale (D,) or None for a factor of 1 -> (..., D).
    Dtypes: floating; everything in float32 (float64 for float64 input), `offset + scale` too; the
        output has x's dtype.

    Args:
        x: the input.
        scale: the learned scale less `offset`.
        epsilon: added to the mean square.
        offset: 1 in Gemma, so that a scale of zeros multiplies by 1; 0 in most models.

    Parity: Transformers' `Gemma3RMSNorm` and, with 0, `Qwen3RMSNorm`; keras-hub's
        `RMSNormalization` of Gemma.
    Source: https://arxiv.org/abs/1910.07467
    """
    dtype = wide(x)
    y = ops.cast(x, dtype)
    y = ops.multiply(y, ops.rsqrt(mean(ops.square(y)) + epsilon))
    if scale is None:
        return ops.cast(y, ops.dtype(x))
    factor = ops.cast(scale, dtype)
    if offset:
        factor = offset + factor
    return ops.cast(ops.multiply(y, factor), ops.dtype(x))
