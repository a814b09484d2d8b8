"""Sigmoid linear unit as a gate."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops._wide import wide


@op
def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of `gate`, times `up`.

    Shapes: both equal; the output has them too.
    Dtypes: floating, both equal; the output has it too. SiLU is computed in float32 (float64 for
        float64 input) and rounded once: XLA rounds each step of a sigmoid in bfloat16.

    Args:
        gate: what goes through SiLU.
        up: what it multiplies.

    Parity: the gate of Transformers' `Qwen3MLP` and `Dinov2SwiGLUFFN`.
    Source: https://arxiv.org/abs/2002.05202
    """
    y = ops.cast(gate, wide(gate))
    return ops.multiply(ops.cast(y * ops.sigmoid(y), ops.dtype(gate)), up)
