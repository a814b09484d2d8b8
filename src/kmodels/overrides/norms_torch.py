"""Normalization for torch: one fused layer norm, and RMS norm with a lean backward pass.

RMS norm keeps x and one number per row; autograd would keep five arrays of x's size.
"""

from functools import cache
from typing import Any

import torch

from kmodels.core.dispatch import override
from kmodels.ops.norms import layer_norm, rms_norm
from kmodels.overrides._backward_torch import Context, backward, outside_graph, written
from kmodels.overrides._tensors_torch import PLAIN, as_tensor

# Elements up to which calls of torch take longer on CPUs than the arithmetic.
LARGE = 2**14


@override(layer_norm)
def layer_norm_torch(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *, epsilon: float = 1e-6
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm`, whose statistics are float32 for narrower inputs too."""
    x, scale = as_tensor(x), as_tensor(scale)
    bias = None if bias is None else as_tensor(bias)
    width = (x.shape[-1],)
    if scale.dtype is x.dtype and (bias is None or bias.dtype is x.dtype):
        return torch.layer_norm(x, width, scale, bias, epsilon)
    # The kernel takes one dtype; a wider scale must not be rounded, so all go up.
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    return torch.layer_norm(x.to(dtype), width, scale.to(dtype), bias, epsilon).to(x.dtype)


def _again(ctx: Context) -> Any:
    x, scale, _ = ctx.saved_tensors
    return (x, scale), lambda x, scale: rms_norm.generic(
        x, scale, epsilon=ctx.epsilon, offset=ctx.offset
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, scale: torch.Tensor | None, epsilon: float, offset: float
    ) -> torch.Tensor:
        y, inverse = _normalise(x, scale, epsilon, offset)
        ctx.save_for_backward(x, scale, inverse)
        ctx.epsilon, ctx.offset = epsilon, offset
        return written(y)

    @staticmethod
    @backward(_again)
    def backward(
        ctx: Context, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, scale, inverse = ctx.saved_tensors
        wide = inverse.dtype
        y = x.to(wide, copy=True).mul_(inverse)
        for_x = for_scale = None
        if ctx.needs_input_grad[1]:
            for_scale = (gradients[0] * y).flatten(0, -2).sum(0).to(scale.dtype)
        if ctx.needs_input_grad[0]:
            slope = gradients[0].to(wide, copy=True)
            if scale is not None:
                slope.mul_(ctx.offset + scale.to(wide))
            inner = torch.linalg.vecdot(slope, y).unsqueeze(-1).div_(x.shape[-1])
            for_x = slope.sub_(y.mul_(inner)).mul_(inverse).to(x.dtype)
        return for_x, for_scale, None, None


def _normalise(
    x: torch.Tensor, scale: torch.Tensor | None, epsilon: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result, and the inverse root mean square of each row."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # In place: on a CPU, allocating an array of this size takes as long as the sum.
    y = x.to(wide, copy=True)
    squares = torch.linalg.vecdot(y, y).unsqueeze(-1)
    inverse = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    y.mul_(inverse)
    if scale is not None:
        y.mul_(offset + scale.to(wide))
    return y.to(x.dtype), inverse


@cache
def _constants(
    width: int, epsilon: float, offset: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the root of width x epsilon, offset x the root of width, and that root.

    Python numbers would take twice as long, since torch makes a tensor of each.
    """
    root = width**0.5
    numbers = ((width * epsilon) ** 0.5, offset * root, root)
    floor, base, factor = (torch.tensor(number, dtype=dtype) for number in numbers)
    return floor, base, factor


def _small(
    x: torch.Tensor, scale: torch.Tensor | None, epsilon: float, offset: float
) -> torch.Tensor:
    """Returns the result in as few calls of torch as possible, by the norm of each row.

    With d numbers in a row: x / hypot(|x|, sqrt(d epsilon)) * sqrt(d) (offset + scale), where the
    last factor is 1 without a scale.
    """
    dtype = x.dtype
    wide = x if dtype.itemsize >= 4 else x.float()
    if scale is not None and scale.dtype is not wide.dtype:
        scale = scale.to(wide.dtype)
    floor, base, factor = _constants(x.shape[-1], epsilon, offset, wide.dtype)
    length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(floor)
    y = wide.div(length).mul_(factor if scale is None else torch.addcmul(base, factor, scale))
    return y if dtype is wide.dtype else y.to(dtype)


def by_rows(x: torch.Tensor) -> bool:
    """Returns True if torch's `rms_norm`, many calls on CPUs, is not used."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


@override(rms_norm, outside_graph)
def rms_norm_torch(
    x: torch.Tensor, scale: torch.Tensor | None, *, epsilon: float = 1e-6, offset: float = 1.0
) -> torch.Tensor:
    """Keeps x and one number per row for the backward pass."""
    x, scale = as_tensor(x), None if scale is None else as_tensor(scale)
    if not torch.is_grad_enabled():
        if not by_rows(x):  # it is one kernel, or the compiler makes one of it
            wide = torch.promote_types(x.dtype, torch.float32)
            y = torch.rms_norm(x.to(wide), (x.shape[-1],), None, epsilon)
            return (y if scale is None else y.mul_(offset + scale.to(wide))).to(x.dtype)
        if x.numel() < LARGE and type(x) in PLAIN:
            return _small(x, scale, epsilon, offset)
        return _normalise(x, scale, epsilon, offset)[0]
    return _RMSNorm.apply(x, scale, epsilon, offset)
