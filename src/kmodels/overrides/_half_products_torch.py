"""Products of half precision on a CPU that has none: in float32, rounded once.

Without AVX512 or AMX, torch multiplies matrices in bfloat16 number by number. On such a processor
a product in float32 takes a hundredth of the time, with both operands cast before it
(`benchmarks/results/ops_torch_half-products-cpu_*.json`).
"""

import torch

from kmodels.overrides._tensors_torch import widens

# Numbers of a kernel that are cast at a time: 4 MiB in float32, which stay in a cache.
TILE = 2**20
# Rows of the other operand that are cast at a time.
ROWS = 1024
# Rows of which each takes torch less time than the cast of the kernel: 33 ms and 50 for a table of
# 64,000 by 2,560.
FEW = 2


def by_rows(x: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Returns whether few rows meet a kernel that lies by its outputs, which torch multiplies well.

    Generation lays kernels so, and a transposed table lies so.
    """
    return kernel.stride(0) == 1 and x.numel() <= FEW * x.shape[-1]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype in which its products are made."""
    return x.float() if widens(x) else x


def product(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x (..., in) @ kernel (in, out) + bias in the dtype of x, without autograd.

    The operands are cast in parts, so that the memory for that does not grow with them.
    """
    rows, columns = x.flatten(0, -2), kernel.shape[1]
    output = x.new_empty(rows.shape[0], columns)
    step = max(1, TILE // max(1, kernel.shape[0]))
    for top in range(0, rows.shape[0], ROWS):
        below = slice(top, top + ROWS)
        part = rows[below].float()
        for start in range(0, columns, step):
            beside = slice(start, start + step)
            found = part @ kernel[:, beside].float()
            output[below, beside] = found if bias is None else found.add_(bias[beside])
    return output.view(*x.shape[:-1], columns)
