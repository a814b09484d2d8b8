"""Attention by products on torch's CPU, a block of queries after the other."""

from typing import Any, NamedTuple, cast

import keras
import torch

from kmodels.core import internals_torch
from kmodels.ops._attention_blockwise import MASKED, allowed_pairs
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor
from kmodels.overrides.blocks import Block, blocks, near
from kmodels.overrides.dropout_torch import Draw

# Scores at a time: 0.5 MB in bfloat16, which a core's own cache holds.
NEAR = 2**18


class Options(NamedTuple):
    """Options of the products, as in `kmodels.ops.attention`."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    again: bool  # whether a backward pass computes the weights again


class Kept:
    """Draws what dropout keeps of all weights (B, K, T * G, S): at once, or for each block again.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        rate: rate of the dropout.
        seed: its generator, which moves on.
        again: whether each block is drawn when it is asked for, so that none is held.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rate: float,
        seed: keras.random.SeedGenerator,
        again: bool,
    ):
        groups = key.shape[2]
        shared = query.shape[2] // groups
        self.shape = (query.shape[0], groups, query.shape[1] * shared, key.shape[1])
        self.draw = Draw(seed, rate)
        self.share = self.draw.share
        self.whole = None if again else self.draw(*self.shape).view(self.shape)

    def of(self, part: slice, rows: slice, seen: slice) -> torch.Tensor:
        """Returns bytes (b * K, t * G, s)."""
        if self.whole is not None:
            return self.whole[part, :, rows, seen].flatten(0, 1)
        count = (
            part.stop - part.start,
            self.shape[1],
            rows.stop - rows.start,
            seen.stop - seen.start,
        )
        drawn = self.draw(*count, number=(part.start, rows.start))
        return drawn.view(count).flatten(0, 1)

    def all(self, parts: list[slice], cut: list[Block], shared: int) -> torch.Tensor:
        """Returns all bytes (B, K, T * G, S), for a second derivative."""
        if self.whole is not None:
            return self.whole
        found = torch.zeros(self.shape, dtype=torch.uint8)
        for part in parts:
            for queries, seen in cut:
                rows = rows_of(queries, shared)
                drawn = self.of(part, rows, seen)
                found[part, :, rows, seen] = drawn.unflatten(0, (-1, self.shape[1]))
        return found


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    soft_cap: float | None = None,
    kept: torch.Tensor | None = None,
    share: float = 1.0,
) -> torch.Tensor:
    """Returns the definition, which autograd differentiates as often as asked."""
    batch, length, heads, width = query.shape
    keys, groups = key.shape[1:3]
    split = (groups, heads // groups)
    scores = torch.einsum("btkgh,bskh->bktgs", query.unflatten(2, split), key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (width**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    allowed = allowed_pairs(query, key, mask, causal, window, segments)
    if allowed is not None:
        allowed = as_tensor(allowed).expand(batch, heads, length, keys)
        allowed = allowed.unflatten(1, split).transpose(2, 3)
        scores = scores.masked_fill(~allowed, MASKED)
    weights = torch.softmax(scores, -1).to(value.dtype)
    if mask is not None and allowed is not None:
        weights = weights * allowed.any(-1, keepdim=True)
    if kept is not None:
        weights = weights * (kept.view_as(weights).to(weights.dtype) * share)
    return torch.einsum("bktgs,bskh->btkgh", weights, value).flatten(2, 3)


def _products_again(ctx: Context) -> Any:
    query, key, value, mask, segments, *_ = ctx.saved_tensors
    causal, window, scale, soft_cap, _ = ctx.options
    kept, share = None, 1.0
    if ctx.kept is not None:
        kept, share = ctx.kept.all(ctx.parts, ctx.blocks, ctx.shared), ctx.kept.share
    options = mask, segments, causal, window, scale, soft_cap, kept, share
    return (query, key, value), lambda q, k, v: plain(q, k, v, *options)


class _NoContext:
    """Takes what a forward pass keeps for a backward pass that does not come."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        pass


def forward_alone(*arguments: Any) -> torch.Tensor:
    """Returns the result of `Products` for which no gradient is asked."""
    return Products.forward(cast(Context, _NoContext()), *arguments)


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    hidden: tuple[torch.Tensor | None, torch.Tensor | None],
    near_keys: tuple[slice, slice, int],
    options: Options,
    split: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weights of a block (b * K, t * G, s), and the slopes of the soft cap.

    `hidden` are the mask (b or 1, N or 1, T or 1, S or 1) and the segments (b or 1, S).
    `near_keys` are the queries, the keys, and how far the last key is ahead of the last query.
    """
    scores, slopes = scaled_product(query, key.transpose(1, 2), options.scale), None
    if options.soft_cap is not None:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        turned = scores.div_(options.soft_cap).tanh_()
        slopes, scores = 1.0 - turned * turned, turned * options.soft_cap
    (queries, seen, ahead), (mask, segments) = near_keys, hidden
    heads = scores.view(-1, split[0], queries.stop - queries.start, split[1], scores.shape[2])
    close = same = None
    if options.causal or options.window is not None:
        found = near((queries, seen), ahead, options.causal, options.window)
        close = torch.from_numpy(found).to(scores.device)[:, None]
        # The keys before the block's first query need no mask if it is only causal.
        start = 0 if options.window is not None else queries.start + ahead - seen.start
        heads[..., start:].masked_fill_(~close[..., start:], MASKED)
    if segments is not None:
        own = segments[:, None, queries.start + ahead : queries.stop + ahead, None, None]
        same = own == segments[:, None, None, None, seen]
        heads.masked_fill_(~same, MASKED)
    if mask is None:
        return torch.softmax(scores, -1).to(query.dtype), slopes
    # (b or 1, N or 1, T or 1, S or 1) -> (b or 1, K or 1, T or 1, G or 1, S or 1)
    of_heads = split if mask.shape[1] > 1 else (1, 1)
    allowed = mask.reshape(mask.shape[0], *of_heads, *mask.shape[2:]).transpose(2, 3)
    allowed = allowed[:, :, queries if allowed.shape[2] > 1 else slice(None)]
    allowed = allowed[..., seen if allowed.shape[4] > 1 else slice(None)]
    heads.masked_fill_(~allowed, MASKED)
    for other in (close, same):
        if other is not None:
            allowed = allowed & other
    weights = torch.softmax(scores, -1)
    # A query that sees nothing has even weights by now; it gets none.
    weights.view_as(heads).mul_(allowed.any(-1, keepdim=True))
    return weights.to(query.dtype), slopes


class Products(torch.autograd.Function):
    """softmax(query @ key.T) @ value, block by block.

    It keeps the weights, and a byte of dropout; for long texts neither, but computes them again. It
    goes through as many texts or images at a time as have scores that stay near the processor.
    Queries lie inside as (b * K, T * G, H): the G heads that share a key follow each other, so that
    a key head is read once for all of them.
    """

    @staticmethod
    def forward(
        ctx: Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        segments: torch.Tensor | None,
        options: Options,
        kept: Kept | None,
    ) -> torch.Tensor:
        (batch, length, heads, _), (_, keys, groups, _) = query.shape, key.shape
        shared = heads // groups
        ctx.options, ctx.kept, ctx.shared = options, kept, shared
        # 64 queries in float32 and 128 in bfloat16 were measured to be the best.
        size = 256 // query.dtype.itemsize
        # Longer texts without a mask are cut too where weights are computed again.
        ctx.blocks = blocks(length, keys, options.causal, options.window, size, options.again)
        ctx.parts = slices(batch, NEAR // (heads * length * keys))
        share = 1.0 if kept is None else kept.share
        output, saved = torch.empty_like(query, memory_format=torch.contiguous_format), []
        for part in ctx.parts:
            q, k, v = as_rows(query[part], shared), heads_first(key[part]), heads_first(value[part])
            hidden = of_part(mask, part), of_part(segments, part)
            blocks_of_part = []
            for queries, seen in ctx.blocks:
                rows = rows_of(queries, shared)
                places = queries, seen, keys - length
                weights, _ = _weights(
                    q[:, rows], k[:, seen], hidden, places, options, (groups, shared)
                )
                if not options.again:
                    saved.append(weights)
                if kept is not None:
                    weights = weights * kept.of(part, rows, seen)
                blocks_of_part.append(scaled_product(weights, v[:, seen], share))
            first, *rest = blocks_of_part
            whole = torch.cat(blocks_of_part, 1) if rest else first
            output[part] = as_heads(whole, groups, shared)
        ctx.save_for_backward(query, key, value, mask, segments, *saved)
        return output

    @staticmethod
    @backward(_products_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, segments, *saved = ctx.saved_tensors
        found = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        length, keys, groups, shared = query.shape[1], key.shape[1], key.shape[2], ctx.shared
        left, kept, scale = iter(saved), ctx.kept, ctx.options.scale
        share = 1.0 if kept is None else kept.share
        alone = ctx.blocks == [(slice(0, length), slice(0, keys))]
        for part in ctx.parts:
            q, k, v = as_rows(query[part], shared), heads_first(key[part]), heads_first(value[part])
            gradient = as_rows(gradients[0][part], shared)
            hidden = of_part(mask, part), of_part(segments, part)
            totals: list[torch.Tensor] = []
            for queries, seen in ctx.blocks:
                rows, slopes = rows_of(queries, shared), None
                if ctx.options.again:
                    places = queries, seen, keys - length
                    weights, slopes = _weights(
                        q[:, rows], k[:, seen], hidden, places, ctx.options, (groups, shared)
                    )
                else:
                    weights = next(left)
                slope = scaled_product(gradient[:, rows], v[:, seen].transpose(1, 2), share)
                dropped = weights
                if kept is not None:
                    stays = kept.of(part, rows, seen)
                    dropped, slope = weights * stays, slope.mul_(stays)
                slope = internals_torch.softmax_backward(slope, weights)
                if slopes is not None:
                    slope = (slope * slopes).to(slope.dtype)
                of_block = (
                    scaled_product(slope, k[:, seen], scale),
                    scaled_product(slope.transpose(1, 2), q[:, rows], scale),
                    scaled_product(dropped.transpose(1, 2), gradient[:, rows], share),
                )
                if alone:
                    totals = list(of_block)
                    break
                totals = totals or [torch.zeros_like(x) for x in (q, k, v)]
                for total, at, x in zip(totals, (rows, seen, seen), of_block, strict=True):
                    total[:, at].add_(x)
            for whole, total, count in zip(found, totals, (shared, 1, 1), strict=True):
                whole[part] = as_heads(total, groups, count)
        return (*found, *[None] * (len(ctx.needs_input_grad) - 3))


def slices(batch: int, size: int) -> list[slice]:
    """Returns the batch in slices of at least one and at most `size`."""
    size = max(size, 1)
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def as_rows(x: torch.Tensor, shared: int) -> torch.Tensor:
    """(b, T, K * G, H) -> (b * K, T * G, H), a copy: products with strides take longer."""
    batch, length, heads, width = x.shape
    split = x.reshape(batch, length, heads // shared, shared, width)
    return split.permute(0, 2, 1, 3, 4).contiguous().view(-1, length * shared, width)


def as_heads(x: torch.Tensor, groups: int, shared: int) -> torch.Tensor:
    """(b * K, T * G, H) -> (b, T, K * G, H)."""
    split = x.view(-1, groups, x.shape[1] // shared, shared, x.shape[2])
    return split.permute(0, 2, 1, 3, 4).flatten(2, 3)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """(b, S, K, H) -> (b * K, S, H)."""
    return as_rows(x, 1)


def of_part(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """(B or 1, ...) -> (b or 1, ...)."""
    return x if x is None or x.shape[0] == 1 else x[part]


def rows_of(queries: slice, shared: int) -> slice:
    return slice(queries.start * shared, queries.stop * shared)


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale * a @ b, scaled before it is rounded."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)
