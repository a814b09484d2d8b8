"""Root mean square normalisation, with Gemma's shifted scale or a plain one."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops._wide import mean, wide


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
        offset: 1 in Gemma, where zeros leave the normalised values as they are; 0 elsewhere.

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
