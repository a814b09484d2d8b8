"""Gaussian error linear unit."""

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
    if approximate == "sigmoid":  # in bfloat16 each of its steps would be rounded
        y = ops.cast(x, wide(x))
        return ops.cast(y * ops.sigmoid(QUICK * y), ops.dtype(x))
    if ops.dtype(x) == "float64":  # for which TensorFlow's own rounds its constants
        if approximate:
            return x * (0.5 + 0.5 * ops.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x * (0.5 + 0.5 * ops.erf(x * math.sqrt(0.5)))
    return ops.gelu(x, approximate=bool(approximate))
