"""Gated SiLU for torch with a backward of its own: keeps its two inputs and nothing else."""

from typing import Any

import torch
from torch.nn import functional

from kmodels.core.dispatch import override
from kmodels.ops.gated_silu import gated_silu
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor


def _again(ctx: Context) -> Any:
    return ctx.saved_tensors, gated_silu.generic


class _GatedSilu(torch.autograd.Function):
    """Autograd would keep SiLU's result too; it is cheap to compute again."""

    @staticmethod
    def forward(ctx: Context, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @backward(_again)
    def backward(
        ctx: Context, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        gate, up = ctx.saved_tensors
        for_up = functional.silu(gate).mul_(gradients[0])
        for_gate = torch.ops.aten.silu_backward(gradients[0] * up, gate)
        return for_gate, for_up


@override(gated_silu)
def gated_silu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.silu`, times `up`."""
    gate, up = as_tensor(gate), as_tensor(up)
    if not torch.is_grad_enabled():
        return functional.silu(gate) * up
    return _GatedSilu.apply(gate, up)
