"""Affine map of the last axis."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops._wide import matmul


@op
def dense(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine map of the last axis, `x @ kernel + bias`.

    Shapes: x (..., in), kernel (in, out), bias (out,) -> (..., out).
    Dtypes: floating, all equal (the compute dtype), and the output's.

    Args:
        x: the input.
        kernel: the weights, input axis first.
        bias: added to the result if given.

    Raises:
        InputError: if the last axis of `x` is not the kernel's first.

    Parity: `torch.nn.functional.linear(x, kernel.T, bias)`, `keras.layers.Dense`.
    Source: textbook.
    """
    check_width(x, kernel)
    y = matmul(x, kernel)
    return y if bias is None else ops.add(y, bias)


def check_width(x: Tensor, kernel: Tensor) -> None:
    """Raises `InputError` if the last axis of `x` is not the kernel's first."""
    if x.shape[-1] != kernel.shape[0]:
        raise InputError(
            f"dense got x of width {x.shape[-1]} and a kernel of shape {tuple(kernel.shape)}; "
            f"the width must be {kernel.shape[0]}."
        )
