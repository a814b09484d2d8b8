"""Grouped products for torch by `grouped_mm`, which copies neither rows nor kernels."""

from typing import Any

import torch

from kmodels.core.dispatch import OpCall, override
from kmodels.core.internals_torch import grouped_mm
from kmodels.ops.grouped_dense import check_grouped, grouped_dense
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import as_tensor, widens
from kmodels.overrides.dense_torch import product_in_float32

# grouped_mm requires rows of a multiple of this many bytes.
ALIGNED = 16
# Generations of CUDA for which torch has a kernel; for others the host waits for the sizes.
GENERATIONS = (9, 10)


def on_cuda(x: torch.Tensor) -> bool:
    """Returns True if a tensor is on CUDA."""
    return x.device.type == "cuda"


def has_kernel(device: torch.device) -> bool:
    """Returns True if the GPU reads the sizes itself."""
    return torch.cuda.get_device_capability(device)[0] in GENERATIONS


def supports(call: OpCall) -> str | None:
    """Supports the widths and dtypes of `grouped_mm`, on CUDA if the host does not wait."""
    x, kernel = as_tensor(call.x), as_tensor(call.kernel)
    if x.dtype == torch.float64 or x.dtype != kernel.dtype:
        return "grouped_mm has no float64, and no two dtypes"
    if widens(x) and x.shape[0]:
        return outside_graph(call)
    if any(width * x.element_size() % ALIGNED for width in kernel.shape[1:]):
        return "grouped_mm wants rows of a multiple of 16 bytes"
    if not x.shape[0]:
        return "there are no rows"
    if on_cuda(x):
        if x.dtype != torch.bfloat16:
            return "on CUDA the kernel of grouped_mm is for bfloat16"
        if not has_kernel(x.device):
            return "on this GPU grouped_mm waits for the sizes"
    elif x.device.type != "cpu":
        return "grouped_mm is for CPU and CUDA"
    return outside_graph(call)


def of_groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns rows (M, in) by kernels (G, in, out), or columns (in, M) by rows (M, out)."""
    if not widens(a):
        return grouped_mm(a, b, offs=ends)
    stops = ends.tolist()
    groups = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    if b.ndim == 2:
        return torch.stack([product_in_float32(a[:, group], b[group]) for group in groups])
    output = a.new_zeros(a.shape[0], b.shape[2])
    for group, kernel in zip(groups, b, strict=True):
        if group.stop > group.start:
            output[group] = product_in_float32(a[group], kernel)
    return output


def _again(ctx: Context) -> Any:
    x, kernel, _, sizes = ctx.saved_tensors
    return (x, kernel), lambda x, kernel: grouped_dense.generic(x, kernel, sizes)


class _Grouped(torch.autograd.Function):
    """Autograd would pass expanded gradients, which `grouped_mm` rejects."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, kernel: torch.Tensor, ends: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, kernel, ends, sizes)
        return of_groups(x, kernel, ends)

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, kernel, ends, _ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_x = for_kernel = None
        if ctx.needs_input_grad[0]:
            for_x = of_groups(gradient, kernel.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            for_kernel = of_groups(x.T, gradient, ends)
        return for_x, for_kernel, None, None


@override(grouped_dense, supports)
def grouped_dense_torch(x: torch.Tensor, kernel: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`."""
    x, kernel, sizes = as_tensor(x).contiguous(), as_tensor(kernel).contiguous(), as_tensor(sizes)
    check_grouped(x, kernel)
    ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    if not torch.is_grad_enabled():
        return of_groups(x, kernel, ends)
    return _Grouped.apply(x, kernel, ends, sizes)
