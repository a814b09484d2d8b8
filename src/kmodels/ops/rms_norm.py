"""Root mean square normalisation with Gemma's shifted scale."""

from keras import ops

from kmodels.core.dispatch import Tensor, op
from kmodels.ops._wide import mean, wide


@op
def rms_norm(x: Tensor, scale: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Divides the last axis by its root mean square and multiplies by `1 + scale`.

    Shapes: x (..., D), scale (D,) -> (..., D).
    Dtypes: floating; everything in float32 (float64 for float64 input), `1 + scale` too; the output
        has x's dtype.

    Args:
        x: the input.
        scale: the learned scale less 1, so that zeros leave the normalised values as they are.
        epsilon: added to the mean square.

    Parity: Transformers' `Gemma3RMSNorm`, keras-hub's `RMSNormalization` of Gemma.
    Source: https://arxiv.org/abs/1910.07467
    """
    dtype = wide(x)
    y = ops.cast(x, dtype)
    y = ops.multiply(y, ops.rsqrt(mean(ops.square(y)) + epsilon))
    return ops.cast(ops.multiply(y, 1.0 + ops.cast(scale, dtype)), ops.dtype(x))
