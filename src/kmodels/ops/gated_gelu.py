"""Gaussian error linear unit as a gate."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops.gelu import gelu


@op
def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns the tanh form of GELU of `gate`, times `up`.

    Shapes: both equal; the output has them too.
    Dtypes: floating, both equal; the output has it too.

    Args:
        gate: what goes through GELU.
        up: what it multiplies.

    Parity: the gate of Transformers' `Gemma3MLP`.
    Source: https://arxiv.org/abs/2002.05202
    """
    return ops.multiply(gelu.generic(gate, approximate=True), up)
