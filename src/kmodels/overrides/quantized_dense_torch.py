"""Products with kernels of 4 bits and FP8 for torch, widened in parts that fit a cache.

The generic body looks up all numbers of a kernel at once, by indices of 4 bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kmodels.core.dispatch import OpCall, override
from kmodels.core.few_bits import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.ops.quantized_dense import quantized_dense
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import as_tensor
from kmodels.overrides.dense_torch import affine

# Bytes of numbers that are looked up at a time on a CPU.
PART = 2**18
_CONSTANTS: dict[tuple[str, torch.device], torch.Tensor] = {}


def supports(call: OpCall) -> str | None:
    """Returns why the call goes to the generic body, or None."""
    if call.mode not in (*TABLES, "fp8"):
        return f"numbers of {call.mode} are in no table"
    if call.sizes is not None:
        return "kernels of groups are multiplied by the op of groups"
    if torch.compiler.is_compiling():
        return "torch.compile makes one kernel of the generic body"
    return outside_graph(call)


@override(quantized_dense, supports)
def quantized_dense_torch(
    x: torch.Tensor,
    arrays: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    mode: str = "int8",
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the product with a kernel that is made again in the backward pass."""
    tensors = [as_tensor(array) for array in arrays]
    return _Product.apply(as_tensor(x), None if bias is None else as_tensor(bias), mode, *tensors)


def _again(ctx: Context) -> Any:
    arrays, mode, dtype = ctx.saved_tensors, ctx.mode, ctx.dtype
    x = torch.zeros((), dtype=dtype, device=arrays[0].device).expand(ctx.shape)
    bias = torch.zeros((), dtype=dtype, device=arrays[0].device).expand(arrays[0].shape[1])

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, _wide(arrays, mode, ctx.shape[-1], dtype).T, bias)

    return (x, bias), function


class _Product(torch.autograd.Function):
    """Keeps the parts of the kernel, which the backward pass dequantizes again."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        mode: str,
        *arrays: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*arrays)
        ctx.mode, ctx.dtype, ctx.shape = mode, x.dtype, x.shape
        return affine(x, _wide(arrays, mode, x.shape[-1], x.dtype), bias)

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            kernel = _wide(ctx.saved_tensors, ctx.mode, ctx.shape[-1], ctx.dtype)
            for_x = affine(gradient, kernel.T)
        if ctx.needs_input_grad[1]:
            for_bias = gradient.flatten(0, -2).sum(0)
        return for_x, for_bias, *[None] * (len(ctx.needs_input_grad) - 2)


def _constant(name: str, device: torch.device) -> torch.Tensor:
    if (name, device) in _CONSTANTS:
        return _CONSTANTS[name, device]
    numbers = DYNAMIC.tolist() if name == "dynamic" else TABLES[name]
    if device.type == "cpu":
        made = torch.tensor(numbers, device=device)
    else:  # a copy from the host would wait for the device
        made = torch.cat([torch.full((1,), number, device=device) for number in numbers])
    if type(made) is torch.Tensor:  # a fake tensor belongs to its mode
        _CONSTANTS[name, device] = made
    return made


def _scales(scale: torch.Tensor, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    groups, units = scale.shape
    places = torch.arange(units * groups, device=scale.device).view(units, groups).T
    return (
        _constant("dynamic", scale.device)[scale.int()] * nested[places // NESTED_BLOCK, 0] + offset
    )


def _wide(arrays: Sequence[torch.Tensor], mode: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the kernel (rows, out) of the arrays, without autograd."""
    numbers, scale, *more = arrays
    if mode == "fp8":
        return _of_float8(numbers, scale, dtype)
    scale = _scales(scale, *more) if more else scale
    pairs, units = numbers.shape
    # With an odd width there is one group, and the last byte has one row.
    block = max(1, rows // scale.shape[0] // 2)
    at_once = pairs
    if numbers.device.type == "cpu" and scale.shape[0] > 1:
        at_once = max(1, PART // (block * units)) * block
    table, bytes_ = _constant(mode, numbers.device), torch.arange(256, device=numbers.device)
    halves = table[bytes_ >> 4], table[bytes_ & 15]
    kernel = torch.empty(pairs, 2, units, dtype=dtype, device=numbers.device)
    for start in range(0, pairs, at_once):
        part = numbers[start : start + at_once]
        codes = part.reshape(-1).int()
        by_group = scale[start // block : (start + at_once) // block, None]
        for half, numbers_of in enumerate(halves):
            values = torch.index_select(numbers_of, 0, codes).view(
                -1, len(part) // len(by_group), units
            )
            kernel[start : start + at_once, half] = values.mul_(by_group).view_as(part)
    return kernel.view(2 * pairs, units)[:rows]


def _of_float8(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the kernel (rows, out) of bits of float8_e4m3fn and scales (groups, out)."""
    rows, units = numbers.shape
    groups = len(scale)
    values = numbers.view(torch.float8_e4m3fn).view(groups, rows // groups, units)
    kernel = torch.empty(values.shape, dtype=dtype, device=numbers.device)
    at_once = groups
    if numbers.device.type == "cpu":
        at_once = max(1, PART * groups // numbers.numel())
    for start in range(0, groups, at_once):
        part = slice(start, start + at_once)
        kernel[part] = values[part].float().mul_(scale[part, None])
    return kernel.view(rows, units)
