"""Affine map for torch: one call, and on CPUs oneDNN's product if it is faster than torch's.

In float32 torch uses MKL, which does not use AVX512 on processors that are not Intel's: there
oneDNN, which torch includes, was measured to be more than twice as fast, and slower with AVX2.

Without AVX512 or AMX, torch multiplies half precision number by number. On such a CPU a product in
float32, with both operands cast before it and the result rounded once, takes a hundredth of the
time (`benchmarks/results/ops_torch_half-products-cpu_*.json`).
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kmodels.core import internals_torch
from kmodels.core.dispatch import override
from kmodels.ops.dense import check_width, dense
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor, stored, widens

# Multiplications below which the call itself takes as long.
SMALL = 2**21
INFO = Path("/proc/cpuinfo")
# Numbers of a kernel that are cast at a time: 4 MiB in float32, which stay in a cache.
TILE = 2**20
# Rows of the other operand that are cast at a time.
ROWS = 1024
# Rows of which each takes torch less time than the cast of the kernel: 33 ms and 50 for a table of
# 64,000 by 2,560.
FEW = 2


def by_onednn(x: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Returns True if oneDNN is faster: for large products in float32 where MKL is slow.

    Under torch.compile it is False: the compiler chooses the product.
    """
    if x.numel() * kernel.shape[1] < SMALL or x.device.type != "cpu":
        return False
    return x.dtype == torch.float32 and not torch.compiler.is_compiling() and mkl_is_slow()


def in_float32(x: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Returns True if this CPU multiplies these operands faster in float32."""
    return widens(x) and not by_rows(x, kernel)


@cache
def mkl_is_slow() -> bool:
    """Returns True if torch uses MKL on an AMD CPU with AVX512, and includes oneDNN."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    if not internals_torch.has_onednn_linear():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return INFO.is_file() and "AuthenticAMD" in INFO.read_text()


@override(dense)
def dense_torch(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the product and the sum in one call; oneDNN's needs a gradient written here."""
    x, bias = as_tensor(x), None if bias is None else as_tensor(bias)
    kernel = stored(kernel) if torch.is_grad_enabled() else as_tensor(kernel)
    check_width(x, kernel)
    is_wide = in_float32(x, kernel)
    if is_wide and torch.compiler.is_compiling():
        added = None if bias is None else bias.float()
        return functional.linear(x.float(), kernel.to(x.dtype).float().T, added).to(x.dtype)
    if is_wide or by_onednn(x, kernel):
        return _Affine.apply(x, kernel, bias)
    if kernel.dtype is not x.dtype:
        kernel = kernel.to(x.dtype)
    if bias is None:  # the same as `linear` without two transposed views
        return torch.matmul(x, kernel)
    return functional.linear(x, kernel.T, bias)


def _again(ctx: Context) -> Any:
    x, kernel, bias = ctx.saved_tensors
    if x is None:  # the gradient of x depends on its dtype and shape only
        x = torch.zeros((), dtype=ctx.dtype, device=kernel.device).expand(ctx.shape)

    def function(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, kernel.to(x.dtype).T, bias)

    return (x, kernel, bias), function


class _Affine(torch.autograd.Function):
    """Recasts a kernel in half precision, and keeps x only if the kernel needs a gradient."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, kernel, bias)
        ctx.dtype, ctx.shape = x.dtype, x.shape
        return product(x, kernel.to(x.dtype), bias)

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, kernel, _ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_x = for_kernel = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = affine(gradient, kernel.to(ctx.dtype).T)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            for_kernel = matmul(x.flatten(0, -2).T, rows).to(kernel.dtype)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        return for_x, for_kernel, for_bias


def product(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x (..., in) @ kernel (in, out) + bias by oneDNN or in float32, without autograd."""
    if in_float32(x, kernel):
        return product_in_float32(x, kernel, bias)
    return internals_torch.onednn_linear(x, kernel, bias)


def affine(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the faster way to x (..., in) @ kernel (in, out) + bias, without autograd."""
    if in_float32(x, kernel) or by_onednn(x, kernel):
        return product(x, kernel, bias)
    return functional.linear(x, kernel.T, bias)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the faster product of two matrices, without autograd."""
    return product(a, b) if in_float32(a, b) or by_onednn(a, b) else torch.mm(a, b)


def by_rows(x: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Returns True for few rows and a kernel that is contiguous by output, which torch does well.

    Generation stores kernels so, and a transposed table is stored so.
    """
    return kernel.stride(0) == 1 and x.numel() <= FEW * x.shape[-1]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype in which its products are computed."""
    return x.float() if widens(x) else x


def product_in_float32(
    x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x (..., in) @ kernel (in, out) + bias in the dtype of x, without autograd.

    The operands are cast in parts, so that memory does not grow with their size.
    """
    rows, columns = x.flatten(0, -2), kernel.shape[1]
    output = x.new_empty(rows.shape[0], columns)
    step = max(1, TILE // max(1, kernel.shape[0]))
    for top in range(0, rows.shape[0], ROWS):
        below = slice(top, top + ROWS)
        part = rows[below].float()
        for start in range(0, columns, step):
            beside = slice(start, start + step)
            product = part @ kernel[:, beside].float()
            output[below, beside] = product if bias is None else product.add_(bias[beside])
    return output.view(*x.shape[:-1], columns)
