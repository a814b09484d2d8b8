"""Gaussian error linear unit."""

from keras import ops

from kmodels.dispatch import Tensor, op


@op
def gelu(x: Tensor, *, approximate: bool = False) -> Tensor:
    """Gaussian error linear unit, `x * Phi(x)`.

    Shapes: any; the output has the input's.
    Dtypes: floating; the output has the input's.

    Args:
        x: the input.
        approximate: `False` for the error function (ViT), `True` for the tanh formula (Gemma).

    Parity: `jax.nn.gelu`, `torch.nn.functional.gelu`, Transformers' `gelu` and `gelu_pytorch_tanh`.
    Source: https://arxiv.org/abs/1606.08415
    """
    return ops.gelu(x, approximate=approximate)
