"""The two linear maps of a transformer block with GELU between them."""

import keras

from kmodels.core.dispatch import op
from kmodels.core.types import Tensor
from kmodels.ops.activations import gelu
from kmodels.ops.dense import dense
from kmodels.ops.dropout import dropout as dropout_op


@op
def mlp(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    *,
    approximate: bool | str = False,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> Tensor:
    """`gelu(x @ up + up_bias) @ down + down_bias`, with dropout after GELU.

    Shapes: x (..., in), up (in, hidden), up_bias (hidden,), down (hidden, out), down_bias (out,)
        -> (..., out).
    Dtypes: floating, all equal (the compute dtype), and the output's.

    Args:
        x: the input.
        up: weights of the first map, input axis first.
        up_bias: added to its result if given.
        down: weights of the second map.
        down_bias: added to its result if given.
        approximate: as in `ops.gelu`.
        dropout: share of hidden elements set to zero; only if `seed` is given.
        seed: `keras.random.SeedGenerator`, or `None` outside training.

    Raises:
        InputError: if the last axis of `x` is not `up`'s first, or `down`'s first not `up`'s last.

    Parity: Transformers' `ViTIntermediate` and `ViTOutput`, timm's `Mlp`.
    Source: https://arxiv.org/abs/2010.11929 (section 3.1)
    """
    hidden = gelu(dense(x, up, up_bias), approximate=approximate)
    if dropout and seed is not None:
        hidden = dropout_op(hidden, dropout, seed)
    return dense(hidden, down, down_bias)
