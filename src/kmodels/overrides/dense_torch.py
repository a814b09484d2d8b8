"""Affine map for torch: one call, and on CPUs that are not Intel's oneDNN's product in float32.

MKL leaves the wide registers of other makers' processors unused: there oneDNN, which torch carries
too and takes in bfloat16, was measured to be more than twice as fast.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kmodels.dispatch import Tensor, override
from kmodels.ops.dense import check_width, dense
from kmodels.tensors_torch import as_tensor

# Multiplications below which the call itself takes as long.
SMALL = 2**21
INFO = Path("/proc/cpuinfo")


def by_onednn(x: Tensor, kernel: Tensor) -> bool:
    """Large products in float32, where MKL is slow; the compiler chooses its own product."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return mkl_is_slow() and x.numel() * kernel.shape[1] >= SMALL


@cache
def mkl_is_slow() -> bool:
    """Whether torch multiplies by MKL on a processor of AMD, and has oneDNN too."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return INFO.is_file() and "AuthenticAMD" in INFO.read_text()


@override(dense)
def dense_torch(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product and the sum in one call; by oneDNN, its gradients are products of that kind."""
    x, kernel = as_tensor(x), as_tensor(kernel)
    check_width(x, kernel)
    bias = None if bias is None else as_tensor(bias)
    if by_onednn(x, kernel):
        return _Affine.apply(x, kernel, bias)
    return functional.linear(x, kernel.T, bias)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, kernel)
        return product(x, kernel, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_x = for_kernel = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = product(gradient, kernel.T)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            for_kernel = product(x.flatten(0, -2).T, rows)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        return for_x, for_kernel, for_bias


def product(x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
    """X (..., in) @ kernel (in, out) + bias by oneDNN, without autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, kernel.T, bias, "none", [], "")


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The faster product of two matrices, without autograd."""
    return product(a, b) if by_onednn(a, b) else torch.mm(a, b)
