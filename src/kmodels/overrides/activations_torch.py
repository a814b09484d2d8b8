"""Gated activations for torch, whose backward pass keeps the two inputs alone.

Autograd would keep the activation's result too, which is cheap to compute again.
"""

from typing import Any

import torch
from torch.nn import functional

from kmodels.core.dispatch import override
from kmodels.ops.activations import gated_gelu, gated_silu
from kmodels.overrides._backward_torch import Context, backward, written
from kmodels.overrides._tensors_torch import as_tensor


def _again(ctx: Context) -> Any:
    return ctx.saved_tensors, (gated_silu if ctx.is_silu else gated_gelu).generic


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: torch.Tensor, up: torch.Tensor, is_silu: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.is_silu = is_silu
        return written(_active(gate, is_silu).mul_(up))

    @staticmethod
    @backward(_again)
    def backward(
        ctx: Context, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        gate, up = ctx.saved_tensors
        for_up = _active(gate, ctx.is_silu).mul_(gradients[0])
        if ctx.is_silu:
            for_gate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
        else:
            for_gate = torch.ops.aten.gelu_backward(gradients[0] * up, gate, approximate="tanh")
        return for_gate, for_up, None


def _active(gate: torch.Tensor, is_silu: bool) -> torch.Tensor:
    return functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")


@override(gated_gelu)
def gated_gelu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.gelu` in its tanh form, times `up`."""
    gate, up = as_tensor(gate), as_tensor(up)
    if not torch.is_grad_enabled():
        return functional.gelu(gate, approximate="tanh") * up
    return _Gated.apply(gate, up, False)


@override(gated_silu)
def gated_silu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.silu`, times `up`."""
    gate, up = as_tensor(gate), as_tensor(up)
    if not torch.is_grad_enabled():
        return functional.silu(gate) * up
    return _Gated.apply(gate, up, True)
