"""Affine map for torch: the bias is added inside the matrix product."""

from keras import ops
from torch.nn import functional

from kmodels.dispatch import Tensor, override
from kmodels.ops.dense import check_width, dense


@override(dense)
def dense_torch(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; the transposed kernel is a view and costs nothing."""
    x, kernel = ops.convert_to_tensor(x), ops.convert_to_tensor(kernel)
    check_width(x, kernel)
    return functional.linear(x, kernel.t(), None if bias is None else ops.convert_to_tensor(bias))
