"""Divergence of two classifiers over a large vocabulary on torch, some positions at a time."""

import math
from typing import Any, NamedTuple

import torch

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.linear_cross_entropy import check_rows
from kmodels.ops.linear_divergence import (
    check_kind,
    check_linear_divergence,
    check_positive,
    linear_divergence,
)
from kmodels.overrides import linear_cross_entropy_torch as losses
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import as_tensor
from kmodels.overrides.dense_torch import matmul, wide

# Bytes of float32 scores in a part. Products of fewer rows are slower on a CPU, and an accelerator
# starts a dozen kernels for each part.
BUDGET, BUDGET_OF_CUDA = 2**26, 2**28


class Settings(NamedTuple):
    """The settings of a call, as in the op."""

    kind: str
    share: float
    temperature: float
    soft_cap: float | None
    teacher_soft_cap: float | None


def _supports(call: OpCall) -> str | None:
    if call.trainable_table or call.rows is not None:
        return "the table or rows of it are trained, whose gradients need the logits again"
    return outside_graph(call)


@override(linear_divergence, _supports)
def linear_divergence_torch(
    hidden: torch.Tensor,
    table: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_table: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kmodels.ops.linear_divergence`; the forward pass computes the gradients too.

    On a CPU, positions of weight 0 are left out.
    """
    hidden, table, teacher_hidden, teacher_table = (
        as_tensor(x) for x in (hidden, table, teacher_hidden, teacher_table)
    )
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    weights = (
        torch.ones(hidden.shape[:1], dtype=dtype, device=hidden.device)
        if weights is None
        else as_tensor(weights).detach().to(dtype)
    )
    check_linear_divergence(hidden, table, teacher_hidden, teacher_table, weights)
    check_rows(table, rows, row_ids, trainable_table)
    check_positive(temperature, soft_cap, teacher_soft_cap)
    settings = Settings(kind, check_kind(kind, beta), temperature, soft_cap, teacher_soft_cap)
    counted, places, states = weights != 0, None, (hidden, teacher_hidden.detach())
    # Shapes that depend on values would break the graph, or make the host wait.
    if losses.on_cuda(hidden) or torch.compiler.is_compiling() or counted.all():
        hidden, teacher_hidden = (torch.where(counted[:, None], x, 0) for x in states)
    else:
        places = counted.nonzero().squeeze(1)
        hidden, teacher_hidden = (x[places] for x in states)
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    divergences = _Divergence.apply(
        hidden, table.detach(), teacher_hidden, teacher_table.detach(), settings, gradient
    )
    if places is None:
        return weights * divergences
    return torch.zeros_like(weights).index_copy(0, places, weights[places] * divergences)


def _again(ctx: Context) -> Any:
    hidden, *others, _ = ctx.saved_tensors
    kind, share, temperature, soft_cap, teacher_soft_cap = ctx.settings

    def function(hidden: torch.Tensor) -> Any:
        return linear_divergence.generic(
            *(hidden, *others),
            kind=kind,
            beta=share if kind == "jsd" else None,
            temperature=temperature,
            soft_cap=soft_cap,
            teacher_soft_cap=teacher_soft_cap,
        )

    return (hidden,), function


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        table: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_table: torch.Tensor,
        settings: Settings,
        gradient: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        divergences = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        slopes = torch.empty_like(hidden) if gradient else None
        budget = BUDGET_OF_CUDA if losses.on_cuda(hidden) else BUDGET
        size = max(budget // (4 * table.shape[0]), 8)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], table, dtype)
            log_q, slope = _log_softmax(logits, settings.soft_cap, settings.temperature, gradient)
            logits = _logits(teacher_hidden[part], teacher_table, dtype)
            log_p, _ = _log_softmax(logits, settings.teacher_soft_cap, settings.temperature, False)
            divergences[part], of_logits = _part(log_q, log_p, settings)
            if slopes is not None:
                of_logits = of_logits if slope is None else of_logits.mul_(slope)
                narrow = wide(of_logits.to(hidden.dtype))
                slopes[part] = matmul(narrow, table.to(narrow.dtype)).to(hidden.dtype)
                if settings.temperature != 1:
                    slopes[part] /= settings.temperature
        ctx.settings = settings
        if gradient:
            ctx.save_for_backward(hidden, table, teacher_hidden, teacher_table, slopes)
        return divergences

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes = ctx.saved_tensors[-1]
        return slopes * upstream[0].to(slopes.dtype)[:, None], *(None,) * 5


def _logits(hidden: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    hidden = wide(hidden)
    return matmul(hidden, table.to(hidden.dtype).T).to(dtype)


def _log_softmax(
    logits: torch.Tensor, cap: float | None, temperature: float, sloped: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the log-softmax, and the derivative of the capped logits by the uncapped ones."""
    slope = None
    if cap is not None:
        logits = logits.div_(cap).tanh_()
        slope = 1 - logits.square() if sloped else None
        logits = logits.mul_(cap)
    if temperature != 1:
        logits = logits.div_(temperature)
    return torch.log_softmax(logits, 1), slope


def _part(
    log_q: torch.Tensor, log_p: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the divergences (rows,) and their gradients by the student's logits (rows, V)."""
    if settings.kind == "forward_kl":
        p = log_p.exp()
        value = torch.linalg.vecdot(p, log_p.sub_(log_q))
        return value, log_q.exp_().sub_(p)
    q = log_q.exp()
    if settings.kind == "reverse_kl":
        log_ratio = log_q.sub_(log_p)
        value = torch.linalg.vecdot(q, log_ratio)
        return value, log_ratio.sub_(value[:, None]).mul_(q)
    share = settings.share
    log_m = torch.logaddexp(log_p + math.log(share), log_q + math.log(1 - share))
    of_teacher = torch.linalg.vecdot(log_p.exp(), log_p.sub_(log_m))
    log_ratio = log_q.sub_(log_m)
    of_student = torch.linalg.vecdot(q, log_ratio)
    value = share * of_teacher + (1 - share) * of_student
    return value, log_ratio.sub_(of_student[:, None]).mul_(q).mul_(1 - share)
