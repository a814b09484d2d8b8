"""Gaussian error linear unit, and gates by it and by the sigmoid linear unit."""

import math

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops._wide import wide

# Hendrycks and Gimpel 2016, section 2.
QUICK = 1.702


@op
def gelu(x: Tensor, *, approximate: bool | str = False) -> Tensor:
    """Gaussian error linear unit, `x * Phi(x)`.

    Shapes: any; the output has the input's.
    Dtypes: floating; the output has the input's.

    Args:
        x: the input.
        approximate: `False` for the error function (ViT), `True` for the tanh formula (Gemma),
            `"sigmoid"` for `x * sigmoid(1.702 x)`, the "quick GELU" of CLIP.

    Parity: `jax.nn.gelu`, `torch.nn.functional.gelu`, Transformers' `gelu`, `gelu_pytorch_tanh` and
        `quick_gelu`.
    Source: https://arxiv.org/abs/1606.08415
    """
    if approximate == "sigmoid":  # bfloat16 would round each step
        y = ops.cast(x, wide(x))
        return ops.cast(y * ops.sigmoid(QUICK * y), ops.dtype(x))
    if ops.dtype(x) == "float64":  # TensorFlow's own rounds its constants
        if approximate:
            return x * (0.5 + 0.5 * ops.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * (0.5 + 0.5 * ops.erf(x * math.sqrt(0.5)))
    return ops.gelu(x, approximate=bool(approximate))


@op
def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the tanh form of GELU of `gate`, times `up`.

    Shapes: both equal, and the output's.
    Dtypes: floating, both equal, and the output's.

    Args:
        gate: input of GELU.
        up: multiplied by GELU of the gate.

    Parity: the gate of Transformers' `Gemma3MLP`.
    Source: https://arxiv.org/abs/2002.05202
    """
    return ops.multiply(gelu.generic(gate, approximate=True), up)


@op
def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of `gate`, times `up`.

    Shapes: both equal, and the output's.
    Dtypes: floating, both equal, and the output's. SiLU is computed in float32 (float64 for
        float64 input) and rounded once: XLA rounds each step of a sigmoid in bfloat16.

    Args:
        gate: input of SiLU.
        up: multiplied by SiLU of the gate.

    Parity: the gate of Transformers' `Qwen3MLP` and `Dinov2SwiGLUFFN`.
    Source: https://arxiv.org/abs/2002.05202
    """
    y = ops.cast(gate, wide(gate))
    return ops.multiply(ops.cast(y * ops.sigmoid(y), ops.dtype(gate)), up)
