"""Gaussian error linear unit."""

from keras import ops

from kmodels.dispatch import Tensor, op

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
    if approximate == "sigmoid":
        return x * ops.sigmoid(QUICK * x)
    return ops.gelu(x, approximate=bool(approximate))
