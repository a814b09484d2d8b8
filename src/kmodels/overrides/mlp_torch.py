"""The MLP for torch with a custom gradient, which keeps one array of hidden activations.

Autograd keeps the input and the output of GELU, with dropout a third array, and these are the
largest of a block. The output is cheap to recompute, and so are bfloat16 copies of float32 kernels.
"""

from typing import Any

import keras
import torch
from torch.nn import functional

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.activations import QUICK
from kmodels.ops.dense import check_width
from kmodels.ops.mlp import mlp
from kmodels.overrides import dropout_torch
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor, stored
from kmodels.overrides.dense_torch import affine, matmul

_FORMS: dict[bool | str, str] = {False: "none", True: "tanh", "sigmoid": "sigmoid"}


def supports(call: OpCall) -> str | None:
    """Supports all calls outside torch.compile, with the dropout that its override supports."""
    if torch.compiler.is_compiling():
        return "the compiler decides what to keep"
    if call.dropout and call.seed is not None:
        return dropout_torch.unsupported(call.x, call.dropout, call.seed)
    return None


@override(mlp, supports)
def mlp_torch(
    x: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    *,
    approximate: bool | str = False,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the same products, and GELU once more in the backward pass."""
    x = as_tensor(x)
    up_bias = None if up_bias is None else as_tensor(up_bias)
    down_bias = None if down_bias is None else as_tensor(down_bias)
    if not torch.is_grad_enabled() and not (dropout and seed is not None):
        up, down = as_tensor(up), as_tensor(down)
        check_width(x, up)
        check_width(up, down)
        if up.dtype is not x.dtype:
            up, down = up.to(x.dtype), down.to(x.dtype)
        hidden = affine(x, up, up_bias)
        hidden = _active(hidden, _FORMS[approximate], None, 1.0)
        return affine(hidden, down, down_bias)
    up, down = stored(up), stored(down)
    check_width(x, up)
    check_width(up, down)
    kept, share = None, 1.0
    if dropout and isinstance(seed, keras.random.SeedGenerator):
        kept, share = dropout_torch.keep(seed, x.numel() // up.shape[0] * up.shape[1], dropout)
        kept = kept.view(*x.shape[:-1], up.shape[1])
    return _MLP.apply(x, up, down, up_bias, down_bias, _FORMS[approximate], kept, share)


def _again(ctx: Context) -> Any:
    x, up, down, _, kept, *biases = ctx.saved_tensors

    def function(
        x: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = functional.linear(x, up.to(x.dtype).T, up_bias)
        if ctx.form == "sigmoid":
            hidden = torch.sigmoid(QUICK * hidden) * hidden
        else:
            hidden = functional.gelu(hidden, approximate=ctx.form)
        if kept is not None:
            hidden = hidden * (kept.to(hidden.dtype) * ctx.share)
        return functional.linear(hidden, down.to(x.dtype).T, down_bias)

    return (x, up, down, *biases), function


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        form: str,
        kept: torch.Tensor | None,
        share: float,
    ) -> torch.Tensor:
        hidden = affine(x, up.to(x.dtype), up_bias)
        ctx.save_for_backward(x, up, down, hidden, kept, up_bias, down_bias)
        ctx.form, ctx.share = form, share
        return affine(_active(hidden, form, kept, share), down.to(x.dtype), down_bias)

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, up, down, hidden, kept, *_ = ctx.saved_tensors
        for_x, for_up, for_down, for_up_bias, for_down_bias, *_ = ctx.needs_input_grad
        slopes: list[torch.Tensor | None] = [None] * 8
        gradient = gradients[0].contiguous()
        rows = gradient.flatten(0, -2)
        if for_down:
            active = _active(hidden, ctx.form, kept, ctx.share)
            slopes[2] = matmul(active.flatten(0, -2).T, rows).to(down.dtype)
            del active
        if for_down_bias:
            slopes[4] = rows.sum(0)
        if not (for_x or for_up or for_up_bias):
            return tuple(slopes)
        slope = affine(gradient, down.to(x.dtype).T)
        if kept is not None:
            slope = dropout_torch.scaled(slope, kept, ctx.share)
        slope = _slope(slope, hidden, ctx.form)
        rows = slope.flatten(0, -2)
        if for_up:
            slopes[1] = matmul(x.flatten(0, -2).T, rows).to(up.dtype)
        if for_up_bias:
            slopes[3] = rows.sum(0)
        if for_x:
            slopes[0] = affine(slope, up.to(x.dtype).T)
        return tuple(slopes)


def _active(
    hidden: torch.Tensor, form: str, kept: torch.Tensor | None, share: float
) -> torch.Tensor:
    """Returns the input of the second product."""
    if form == "sigmoid":
        active = torch.sigmoid(QUICK * hidden).mul_(hidden)
    else:
        active = functional.gelu(hidden, approximate=form)
    return active if kept is None else dropout_torch.scaled(active, kept, share)


def _slope(gradient: torch.Tensor, hidden: torch.Tensor, form: str) -> torch.Tensor:
    """Returns the gradient of GELU's input."""
    if form != "sigmoid":
        return torch.ops.aten.gelu_backward(gradient, hidden, approximate=form)
    share = torch.sigmoid(QUICK * hidden)
    return gradient * (share * (1.0 + QUICK * hidden * (1.0 - share)))
