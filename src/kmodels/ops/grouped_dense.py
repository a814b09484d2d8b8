"""Linear maps of grouped rows, with one kernel per group."""

from typing import Any

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops._wide import products


@op
def grouped_dense(x: Tensor, kernel: Tensor, sizes: Tensor) -> Tensor:
    """`x[i] @ kernel[g]` for the rows i of each group g: the products of a mixture of experts.

    Shapes: x (N, in), kernel (G, in, out), sizes (G,) -> (N, out). The first sizes[0] rows are
        those of group 0, and so on; a group may have none. Rows behind the last group have no
        meaning.
    Dtypes: x and kernel floating and equal (the compute dtype), as the output; sizes int32.

    Args:
        x: the rows, in the order of their groups.
        kernel: the weights of each group, input axis first.
        sizes: number of rows of each group; not differentiated.

    Raises:
        InputError: if the last axis of `x` is not the second of the kernel.

    Parity: `jax.lax.ragged_dot(x, kernel, sizes)`.
    Source: the blocks of equal length are those of https://arxiv.org/abs/2211.15841
    """
    check_grouped(x, kernel)
    sizes = ops.convert_to_tensor(sizes, "int32")
    groups, width = kernel.shape[0], kernel.shape[2]
    rows: Any = ops.shape(x)[0]
    # Each block of rows has one kernel, and the last one of a group is filled up. So all shapes are
    # known, and the rows and kernels that are copied are at most twice those that are there.
    larger = max if isinstance(rows, int) else ops.maximum
    length = larger(1, (rows + groups - 1) // groups)
    count = (rows + groups * (length - 1)) // length
    numbers, inside = (ops.arange(0, stop, dtype="int32") for stop in (count, length))
    blocks = (sizes + (length - 1)) // length
    first = ops.cumsum(blocks) - blocks
    start = ops.cumsum(sizes) - sizes
    group = group_of(numbers, blocks)
    place = (numbers - ops.take(first, group))[:, None] * length + inside[None, :]
    there = place < ops.take(sizes, group)[:, None]
    source = ops.where(there, ops.take(start, group)[:, None] + place, 0)
    y = products(rows_of(x, source), rows_of(kernel, group))
    y = ops.reshape(y, (-1, width))
    row = ops.arange(0, rows, dtype="int32")
    group = group_of(row, sizes)
    target = ops.take(first, group) * length + row - ops.take(start, group)
    return ops.take(y, target, axis=0)


def rows_of(array: Tensor, indices: Tensor) -> Any:
    """`array[indices]`, whose gradient is an array: TensorFlow's own would be one of slices."""
    return ops.take(ops.reshape(array, (-1, *array.shape[1:])), indices, axis=0)


def group_of(numbers: Tensor, sizes: Tensor) -> Any:
    """Returns the group of each row number; the last group for numbers behind all."""
    groups = ops.searchsorted(ops.cumsum(sizes), numbers, side="right")
    return ops.minimum(ops.cast(groups, "int32"), sizes.shape[0] - 1)


def check_grouped(x: Tensor, kernel: Tensor) -> None:
    """Raises `InputError` if the last axis of `x` is not the second of the kernel."""
    if len(x.shape) != 2 or x.shape[-1] != kernel.shape[1]:
        raise InputError(
            f"grouped_dense got x of shape {tuple(x.shape)} and a kernel of shape "
            f"{tuple(kernel.shape)}; x must be (rows, {kernel.shape[1]})."
        )
