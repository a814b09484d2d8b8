"""Grouped products for torch, which has them: no row and no kernel is copied."""

import torch
from torch.nn import functional

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.grouped_dense import check_grouped, grouped_dense
from kmodels.overrides._backward_torch import outside_graph
from kmodels.overrides._tensors_torch import as_tensor

# Bytes of which torch wants each row to be a multiple.
ALIGNED = 16
# Generations of CUDA for which torch has a kernel; for others the host waits for the sizes.
GENERATIONS = (9, 10)


def supports(call: OpCall) -> str | None:
    """Serves widths and dtypes that `grouped_mm` has, on CUDA where no host waits."""
    x, kernel = as_tensor(call.x), as_tensor(call.kernel)
    if x.dtype == torch.float64 or x.dtype != kernel.dtype:
        return "grouped_mm has no float64, and no two dtypes"
    if any(width * x.element_size() % ALIGNED for width in kernel.shape[1:]):
        return "grouped_mm wants rows of a multiple of 16 bytes"
    if x.device.type == "cuda":
        if x.dtype != torch.bfloat16:
            return "on CUDA the kernel of grouped_mm is for bfloat16"
        if torch.cuda.get_device_capability(x.device)[0] not in GENERATIONS:
            return "on this device grouped_mm waits for the sizes"
    elif x.device.type != "cpu":
        return "grouped_mm is for CPU and CUDA"
    return outside_graph(call)


@override(grouped_dense, supports)
def grouped_dense_torch(x: torch.Tensor, kernel: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`, which has gradients of its own."""
    x, kernel, sizes = as_tensor(x), as_tensor(kernel), as_tensor(sizes)
    check_grouped(x, kernel)
    ends = torch.cumsum(sizes, 0, dtype=torch.int32)
    return functional.grouped_mm(x.contiguous(), kernel, offs=ends)
