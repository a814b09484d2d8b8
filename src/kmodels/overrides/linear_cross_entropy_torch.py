"""Cross-entropy over a large vocabulary on torch, a tile of it at a time."""

from typing import Any

import torch

from kmodels.core.dispatch import override
from kmodels.ops.linear_cross_entropy import (
    Scoring,
    check_linear_cross_entropy,
    check_rows,
    gradient_of_rows,
    linear_cross_entropy,
    linear_log_probs,
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
    scores, best, weights, _ = _scores(
        *(hidden, table, labels, weights, rows, row_ids), trainable_table, Scoring(soft_cap)
    )
    return -(weights * scores[0]).sum(), (weights * best).sum()


@override(linear_log_probs, outside_graph)
def linear_log_probs_torch(
    hidden: torch.Tensor,
    table: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
    trainable_table: bool = False,
    rows: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """See `kmodels.ops.linear_log_probs`; on a CPU, positions of weight 0 are left out."""
    if weights is None:
        weights = torch.ones(as_tensor(labels).shape, device=as_tensor(hidden).device)
    scores, best, weights, counted = _scores(
        *(hidden, table, labels, weights, rows, row_ids),
        trainable_table,
        Scoring(soft_cap, temperature, with_entropy),
    )
    scores = scores * weights
    if with_hits:
        scores = torch.cat([scores, torch.where(weights != 0, best, 0).to(scores.dtype)[None]])
    if counted is not None:
        places = counted.nonzero().squeeze(1)
        scores = scores.new_zeros(len(scores), len(counted)).index_copy(1, places, scores)
    return tuple(scores) if len(scores) > 1 else scores[0]


def _scores(
    hidden: Any,
    table: Any,
    labels: Any,
    weights: Any,
    rows: Any,
    row_ids: Any,
    trainable_table: bool,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the scores of the positions that count.

    Returns:
        (1, M) log-probabilities, or (2, M) with the entropies; whether each label is the best (M,);
        the weights (M,); which of the positions these are, or None for all.
    """
    check_linear_cross_entropy(hidden, table, labels, weights, scoring)
    check_rows(table, rows, row_ids, trainable_table)
    hidden, table, labels, weights = (as_tensor(x) for x in (hidden, table, labels, weights))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    weights = without_ignored(labels, weights)
    labels, weights = labels.long(), weights.to(dtype)
    counted, left_out = weights != 0, False
    if on_cuda(hidden) or torch.compiler.is_compiling():
        # Shapes that depend on values would break the graph, or make the host wait.
        hidden = torch.where(counted[:, None], hidden, 0)
        labels = torch.where(counted, labels, 0)
    elif not counted.all():
        left_out = True
        hidden, labels, weights = hidden[counted], labels[counted], weights[counted]
    gradient = torch.is_grad_enabled() and hidden.requires_grad
    table_gradient = torch.is_grad_enabled() and trainable_table and table.requires_grad
    if not table_gradient:
        table = table.detach()
    if rows is not None:
        rows, row_ids = as_tensor(rows), as_tensor(row_ids).long()
        gradient = gradient or (torch.is_grad_enabled() and rows.requires_grad)
    scores, best = _Scores.apply(hidden, table, rows, row_ids, labels, scoring, gradient)
    return scores, best, weights.detach(), counted if left_out else None


def _again(ctx: Context) -> Any:
    hidden, table, rows, row_ids, labels, *_ = ctx.saved_tensors

    def function(hidden: torch.Tensor, table: torch.Tensor, rows: torch.Tensor | None) -> Any:
        scores: Any = linear_log_probs.generic(
            hidden,
            table,
            labels,
            soft_cap=ctx.scoring.soft_cap,
            temperature=ctx.scoring.temperature,
            with_entropy=ctx.scoring.with_entropy,
            trainable_table=not ctx.frozen,
            rows=rows,
            row_ids=row_ids,
        )
        return torch.stack(scores if isinstance(scores, tuple) else (scores,))

    return (hidden, table, rows), function


class _Scores(torch.autograd.Function):
    """Log-probabilities, and entropies if wanted.

    With a frozen table, the forward pass computes their derivatives by `hidden` too.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor | None,
        row_ids: torch.Tensor | None,
        labels: torch.Tensor,
        scoring: Scoring,
        gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frozen = not ctx.needs_input_grad[1]
        whole = table if rows is None else table.index_copy(0, row_ids, rows.to(table.dtype))  # type: ignore[arg-type]
        tiles = _Tiles(wide(hidden), whole, labels, scoring)
        total, right, top, entropy, slopes = _walk(tiles, gradient and frozen)
        ctx.scoring, ctx.frozen = scoring, frozen
        if gradient or not frozen:
            slopes = [slope.to(hidden.dtype) for slope in slopes]
            ctx.save_for_backward(hidden, table, rows, row_ids, labels, total, entropy, *slopes)
        best = (right >= top).to(total.dtype)
        ctx.mark_non_differentiable(best)
        results = [right - total] if entropy is None else [right - total, entropy]
        return torch.stack(results), best

    @staticmethod
    @backward(_again)
    def backward(ctx: Context, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, table, rows, row_ids, labels, total, entropy, *slopes = ctx.saved_tensors
        for_loss, for_entropy = -upstream[0][0], None
        if entropy is not None:
            for_entropy = upstream[0][1]
        if not ctx.frozen:
            tiles = _Tiles(wide(hidden), table, labels, ctx.scoring)
            gradients = _gradients(tiles, for_loss, for_entropy, total, entropy)
            return gradients[0].to(hidden.dtype), gradients[1], *(None,) * 5
        for_rows = None
        if ctx.needs_input_grad[2]:
            known = labels, for_loss, for_entropy, total, entropy, ctx.scoring
            for_rows = gradient_of_rows(wide(hidden), rows, row_ids, *known)
        gradient = slopes[0] * for_loss.to(hidden.dtype)[:, None]
        if for_entropy is not None:
            gradient += slopes[1] * for_entropy.to(hidden.dtype)[:, None]
        return gradient, None, for_rows, *(None,) * 4


class _Tiles:
    """Reads a table tile by tile, and computes the logits of each.

    All tiles share the memory: on a CPU, allocating it again costs page faults.

    Args:
        hidden: (M, D).
        table: (V, D).
        labels: (M,) int64.
        scoring: how the scores are computed.
    """

    def __init__(
        self, hidden: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, scoring: Scoring
    ):
        self.hidden, self.table, self.labels, self.scoring = hidden, table, labels, scoring
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
            The rows (v, D); the scores (M, v), and the derivative of the capped logits by the
            uncapped ones; the column of each label in the tile, (M, 1), and whether the tile holds
            it, (M,).
        """
        tile, slope = self.table[start : start + self.size].to(self.hidden.dtype), None
        if self.wide is None:
            score = _product(self.hidden, tile.T, self.dtype)
        else:
            score = self._view(self.wide, tile.shape[0])
            score.copy_(torch.mm(self.hidden, tile.T, out=self._view(self.narrow, tile.shape[0])))
        if self.scoring.soft_cap is not None:
            score = score.div_(self.scoring.soft_cap).tanh_()
            slope = 1 - score.square()
            score = score.mul_(self.scoring.soft_cap)
        if self.scoring.temperature != 1:
            score = score.div_(self.scoring.temperature)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, list[torch.Tensor]]:
    """Goes through the vocabulary once, with a running maximum and sum.

    Returns:
        For each position the log of the summed exponentials, the label's score, the highest score,
        the entropy if wanted, and, with `gradient`, the
        derivatives by `hidden` (M, D): of minus the log-probability, and of the entropy.
    """
    hidden, dtype, scoring = tiles.hidden, tiles.dtype, tiles.scoring
    total = torch.full(hidden.shape[:1], -torch.inf, dtype=dtype, device=hidden.device)
    top, right = torch.full_like(total, torch.finfo(dtype).min), torch.zeros_like(total)
    # The means of (score - top) and, below, of the rows and of (score - top) x row.
    below_top = torch.zeros_like(top) if scoring.with_entropy else None
    slope_right, means = torch.ones_like(top), []
    if gradient:
        means = [
            torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            for _ in range(1 + scoring.with_entropy)
        ]
    for start in tiles.starts:
        tile, score, slope, column, here = tiles.read(start)
        right = torch.where(here, score.gather(1, column).squeeze(1), right)
        highest = score.amax(1)
        last, top = top, torch.maximum(top, highest)
        share = tiles.softmax(score)
        # The largest share is one over the sum of exponentials: softmax is faster than exp alone.
        own = highest - share.amax(1).log_()
        new = torch.logaddexp(total, own)
        before, now = (total - new).exp_(), (own - new).exp_()
        shares = [share]
        if below_top is not None:
            shares.append(score.sub_(top[:, None]).mul_(share))
            below_top = (below_top + (last - top)) * before + score.sum(1) * now
            if means:
                means[1].addcmul_(means[0], (last - top)[:, None])
        if slope is not None and means:
            slope_right = torch.where(here, slope.gather(1, column).squeeze(1), slope_right)
        for mean, each in zip(means, shares, strict=False):
            if slope is not None:
                each.mul_(slope)
            part = _product(tiles.operand(each), tile, dtype)
            mean.mul_(before[:, None]).addcmul_(part, now[:, None])
        total = new
    if means and below_top is not None:
        means[1] = (means[0] * below_top[:, None]).sub_(means[1])
    if means:
        own = tiles.table.index_select(0, tiles.labels).to(dtype)
        means[0].sub_(own if scoring.soft_cap is None else own.mul_(slope_right[:, None]))
    if scoring.temperature != 1:
        means = [mean.div_(scoring.temperature) for mean in means]
    entropy = None if below_top is None else (total - top) - below_top
    return total, right, top, entropy, means


def _gradients(
    tiles: _Tiles,
    for_loss: torch.Tensor,
    for_entropy: torch.Tensor | None,
    total: torch.Tensor,
    entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of `hidden` and `table`; the scores of each tile are recomputed."""
    hidden, dtype = tiles.hidden, tiles.dtype
    for_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    for_table = torch.empty_like(tiles.table)
    for start in tiles.starts:
        tile, score, slope, column, here = tiles.read(start)
        score, factor = score.sub_(total[:, None]), for_loss[:, None]
        if for_entropy is not None and entropy is not None:
            factor = factor - (score + entropy[:, None]) * for_entropy[:, None]
        score = score.exp_().mul_(factor)
        score.scatter_add_(1, column, (-for_loss * here)[:, None])
        if slope is not None:
            score.mul_(slope)
        if tiles.scoring.temperature != 1:
            score.div_(tiles.scoring.temperature)
        score = tiles.operand(score)
        for_hidden.add_(_product(score, tile, dtype))
        for_table[start : start + tiles.size] = _product(score.T, hidden, tiles.table.dtype)
    return for_hidden, for_table
