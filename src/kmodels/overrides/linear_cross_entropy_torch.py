"""Cross-entropy over a large vocabulary on torch, a tile of it at a time."""

from typing import Any

import torch

from kmodels.core.dispatch import override
from kmodels.ops.linear_cross_entropy import (
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    tile_of,
    without_ignored,
)
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import as_tensor
from kmodels.overrides.dense_torch import matmul, wide


def on_cuda(hidden: torch.Tensor) -> bool:
    """Returns True if an accelerator computes, for which the host must not wait."""
    return hidden.is_cuda


@override(linear_cross_entropy, outside_graph)
def linear_cross_entropy_torch(
    hidden: torch.Tensor,
    table: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    soft_cap: float | None = None,
    trainable_table: bool = False,
    rows: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kmodels.ops.linear_cross_entropy`; on a CPU, positions of weight 0 are left out."""
    check_linear_cross_entropy(hidden, table, labels, weights, soft_cap)
    check_rows(table, rows, row_ids, trainable_table)
    hidden, table, labels, weights = (as_tensor(x) for x in (hidden, table, labels, weights))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    weights = without_ignored(labels, weights)
    labels, weights = labels.long(), weights.to(dtype)
    counted = weights != 0
    if on_cuda(hidden) or torch.compiler.is_compiling():
        # Shapes that depend on values would break the graph, or make the host wait.
        hidden = torch.where(counted[:, None], hidden, 0)
        labels = torch.where(counted, labels, 0)
    elif not counted.all():
        hidden, labels, weights = hidden[counted], labels[counted], weights[counted]
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    table_gradient = torch.is_grad_enabled() and trainable_table and table.requires_grad
    if not table_gradient:
        table = table.detach()
    if rows is not None:
        rows, row_ids = as_tensor(rows), as_tensor(row_ids).long()
        gradient = gradient or (torch.is_grad_enabled() and rows.requires_grad)
    losses, best = _Losses.apply(
        hidden, table, rows, row_ids, labels, weights.detach(), soft_cap, gradient
    )
    return losses, best


def _again(ctx: Context) -> Any:
    hidden, table, rows, row_ids, labels, weights, *_ = ctx.saved_tensors

    def function(hidden: torch.Tensor, table: torch.Tensor, rows: torch.Tensor | None) -> Any:
        return linear_cross_entropy.generic(
            hidden,
            table,
            labels,
            weights,
            soft_cap=ctx.soft_cap,
            trainable_table=not ctx.frozen,
            rows=rows,
            row_ids=row_ids,
        )[0]

    return (hidden, table, rows), function


class _Losses(torch.autograd.Function):
    """The two sums; with a frozen table, the forward pass computes the gradient of `hidden` too."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor | None,
        row_ids: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        soft_cap: float | None,
        gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frozen = not ctx.needs_input_grad[1]
        held = table if rows is None else table.index_copy(0, row_ids, rows.to(table.dtype))  # type: ignore[arg-type]
        tiles = _Tiles(wide(hidden), held, labels, soft_cap)
        total, right, top, slope = _walk(tiles, gradient and frozen)
        ctx.soft_cap, ctx.frozen = soft_cap, frozen
        if slope is not None:
            slope = slope.mul_(weights[:, None]).to(hidden.dtype)
        if gradient or not frozen:
            ctx.save_for_backward(hidden, table, rows, row_ids, labels, weights, total, slope)
        best = (weights * (right >= top)).sum()
        ctx.mark_non_differentiable(best)
        return (weights * (total - right)).sum(), best

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = upstream[0]
        hidden, table, rows, row_ids, labels, weights, total, slope = ctx.saved_tensors
        weights = weights * scale
        if not ctx.frozen:
            tiles = _Tiles(wide(hidden), table, labels, ctx.soft_cap)
            slopes = _gradients(tiles, weights, total)
            return slopes[0].to(hidden.dtype), slopes[1], *(None,) * 6
        for_rows = None
        if ctx.needs_input_grad[2]:
            known = labels, weights, total, ctx.soft_cap
            for_rows = gradient_of_rows(wide(hidden), rows, row_ids, *known)
        return slope * scale.to(slope.dtype), None, for_rows, *(None,) * 5


class _Tiles:
    """Reads a table tile by tile, and computes the logits of each.

    All tiles share the memory: on a CPU, allocating it again costs page faults.

    Args:
        hidden: (M, D).
        table: (V, D).
        labels: (M,) int64.
        soft_cap: soft cap of the logits, or None.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        table: torch.Tensor,
        labels: torch.Tensor,
        soft_cap: float | None,
    ):
        self.hidden, self.table, self.labels, self.soft_cap = hidden, table, labels, soft_cap
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Reading a number of positions that the compiler leaves open would fix it.
        positions = None if torch.compiler.is_compiling() else hidden.shape[0]
        self.size = tile_of(table.shape[0], positions, on_cuda(hidden))
        self.starts = range(0, table.shape[0], self.size)
        self.same, count = hidden.dtype == self.dtype, hidden.shape[0] * self.size
        self.shares, self.wide = hidden.new_empty(count, dtype=self.dtype), None
        if not self.same:
            self.narrow = hidden.new_empty(count)
            if not hidden.is_cuda:  # whose products come out wide
                self.wide = torch.empty_like(self.shares)

    def read(
        self, start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Returns the tile that begins at a class.

        Returns:
            The rows (v, D); the logits (M, v), and their derivative by the uncapped ones; the
            column of each label in the tile, (M, 1), and whether the tile holds it, (M,).
        """
        tile, slope = self.table[start : start + self.size].to(self.hidden.dtype), None
        if self.wide is None:
            score = _product(self.hidden, tile.T, self.dtype)
        else:
            score = self._view(self.wide, tile.shape[0])
            score.copy_(torch.mm(self.hidden, tile.T, out=self._view(self.narrow, tile.shape[0])))
        if self.soft_cap is not None:
            score = score.div_(self.soft_cap).tanh_()
            slope = 1 - score.square()
            score = score.mul_(self.soft_cap)
        local, size = self.labels - start, tile.shape[0]
        column, here = local.clamp(0, size - 1)[:, None], (local >= 0) & (local < size)
        return tile, score, slope, column, here

    def softmax(self, score: torch.Tensor) -> torch.Tensor:
        return torch.softmax(score, 1, out=self._view(self.shares, score.shape[1]))

    def operand(self, score: torch.Tensor) -> torch.Tensor:
        """Returns scores in the dtype of the hidden states."""
        return score if self.same else self._view(self.narrow, score.shape[1]).copy_(score)

    def _view(self, memory: torch.Tensor, columns: int) -> torch.Tensor:
        rows = self.hidden.shape[0]
        return memory[: rows * columns].view(rows, columns)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return matmul(a, b).to(dtype)


def _walk(
    tiles: _Tiles, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Goes through the vocabulary once, with a running maximum and sum.

    Returns:
        For each position the log of the summed exponentials, the label's logit, the highest logit
        and, with `gradient`, the derivative of the cross-entropy by `hidden` (M, D).
    """
    hidden, dtype = tiles.hidden, tiles.dtype
    top = torch.full(hidden.shape[:1], -torch.inf, dtype=dtype, device=hidden.device)
    total, right = top.clone(), torch.zeros_like(top)
    slope_right, mean = torch.ones_like(top), None
    if gradient:
        mean = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for start in tiles.starts:
        tile, score, slope, column, here = tiles.read(start)
        right = torch.where(here, score.gather(1, column).squeeze(1), right)
        highest = score.amax(1)
        top = torch.maximum(top, highest)
        share = tiles.softmax(score)
        # The largest share is one over the sum of exponentials: softmax is faster than exp alone.
        own = highest - share.amax(1).log_()
        new = torch.logaddexp(total, own)
        if mean is not None:
            if slope is not None:
                slope_right = torch.where(here, slope.gather(1, column).squeeze(1), slope_right)
                share = share.mul_(slope)
            part = _product(tiles.operand(share), tile, dtype)
            mean.mul_((total - new).exp_()[:, None]).addcmul_(part, (own - new).exp_()[:, None])
        total = new
    if mean is not None:
        own = tiles.table.index_select(0, tiles.labels).to(dtype)
        mean.sub_(own if tiles.soft_cap is None else own.mul_(slope_right[:, None]))
    return total, right, top, mean


def _gradients(
    tiles: _Tiles, weights: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of `hidden` and `table`; the logits of each tile are recomputed."""
    hidden, dtype = tiles.hidden, tiles.dtype
    for_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for_table = torch.empty_like(tiles.table)
    for start in tiles.starts:
        tile, score, slope, column, here = tiles.read(start)
        score = score.sub_(total[:, None]).exp_()
        score.scatter_add_(1, column, -here.to(dtype)[:, None])
        score.mul_(weights[:, None])
        if slope is not None:
            score.mul_(slope)
        score = tiles.operand(score)
        for_hidden.add_(_product(score, tile, dtype))
        for_table[start : start + tiles.size] = _product(score.T, hidden, tiles.table.dtype)
    return for_hidden, for_table
