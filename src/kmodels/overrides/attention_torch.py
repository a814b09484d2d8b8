"""Attention for torch, by the kernel that was measured to be the fastest.

`scaled_dot_product_attention` never holds all attention weights. On CPUs it is the slower one in
half precision, with dropout and under a causal mask, of which it computes both halves; there matrix
products do it, a block of queries after the other, with a backward pass of their own.
"""

from typing import Any, cast

import keras
import numpy as np
import torch
from torch.nn import functional

from kmodels.core.dispatch import OpCall, override
from kmodels.core.errors import InputError
from kmodels.core.framework_internals import internals_torch
from kmodels.ops._attention_parts import MASKED, allowed_pairs
from kmodels.ops.attention import attention, check_attention, check_ids
from kmodels.overrides._attention_products_torch import (
    as_heads,
    as_rows,
    heads_first,
    joined,
    of_part,
    rows_of,
    scaled_product,
    slices,
    weights_of,
)
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor
from kmodels.overrides.blocks import blocks
from kmodels.overrides.dropout_torch import keep

# Keys from which SDPA is taken on CPUs too: the products hold length x keys weights.
LONG = 1024
# Scores at a time: 0.5 MB in bfloat16, which a core's own cache holds.
NEAR = 2**18


def supports(call: OpCall) -> str | None:
    """Serves everything but soft caps, image blocks, and seeds that are not a generator."""
    if call.soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if call.block_ids is not None:
        return "image blocks are left to the op's own body"
    query, drops = call.query, call.dropout and call.seed is not None
    if drops and not isinstance(call.seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if drops and query.dtype == torch.float16 and query.device.type == "cpu":
        return "products would have their scores in float16"
    if torch.compiler.is_compiling() and by_products(query, call.key, call.causal, call.dropout):
        return "on CPU, the compiler makes products of the op itself"
    return None


def by_products(query: torch.Tensor, key: torch.Tensor, causal: bool, rate: float) -> bool:
    """Returns whether products beat SDPA.

    Source: `benchmarks/results/ops_torch_attention-cpu_*.json`.
    """
    if query.device.type != "cpu" or query.dtype == torch.float16:  # whose range scores may leave
        return False
    if rate:
        return True
    return key.shape[1] < LONG and (causal or query.dtype.itemsize < 4)


@override(attention, supports)
def attention_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segment_ids: torch.Tensor | None = None,
    block_ids: torch.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales inside the kernel only; masks that leave a query nothing give zeros, as in the op."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    query, key, value = (as_tensor(x) for x in (query, key, value))
    mask = None if mask is None else as_tensor(mask)
    segments = None if segment_ids is None else as_tensor(segment_ids)
    length, keys = query.shape[1], key.shape[1]
    if length == 1 and segments is not None:  # a row of the mask is all that it hides
        mask, segments = allowed_pairs(query, key, mask, False, None, segments), None
    if length == 1 and window is None and (not dropout or seed is None):
        output = _one_query(query, key, value, mask, scale)
        return _fused(output, query, key, value, mask, None, False, None, scale, 0.0)
    if by_products(query, key, causal, dropout if seed is not None else 0.0):
        kept, share = None, 1.0
        if dropout and seed is not None:
            kept, share = keep(seed, query.shape[0] * length * query.shape[2] * keys, dropout)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if mask is not None:
            mask = allowed_pairs(query, key, mask, False, None)
        products = _Products.apply if torch.is_grad_enabled() else _forward_alone
        return products(query, key, value, mask, segments, causal, window, scale, kept, share)
    # torch aligns its own causal mask to the first key, the op to the last.
    hides = mask is not None or window is not None or segments is not None
    aligned = causal and not hides and length == keys
    allowed = None if aligned else allowed_pairs(query, key, mask, causal, window, segments)
    some = None
    if mask is not None and allowed is not None:
        # Kernels differ in what they do with a row of nothing; let such a row see all, then zero
        # it.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
    rate = dropout if seed is not None else 0.0
    if rate and seed is not None and not torch.compiler.is_compiling():
        # The kernel draws from torch's global generator: key it by the SeedGenerator's state, so
        # that a resumed run repeats. Compiled code cannot, and draws from the global state.
        words = [word & 0xFFFFFFFF for word in seed.next().tolist()]  # type: ignore[attr-defined]
        # torch reads 32 bits of a seed on a CPU, so both words have to reach each of them.
        mixed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
            torch.manual_seed(mixed)
            output = _kernel(query, key, value, allowed, rate, aligned, scale)
    else:
        output = _kernel(query, key, value, allowed, rate, aligned, scale)
    if some is not None:
        output = torch.where(some, output, output.new_zeros(()))
    output = output.transpose(1, 2)
    return _fused(output, query, key, value, mask, segments, causal, window, scale, rate)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    rate: float,
    aligned: bool,
    scale: float | None,
) -> torch.Tensor:
    """(B, T, N, H) three times -> (B, N, T, H)."""
    return functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=allowed,
        dropout_p=rate,
        is_causal=aligned,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )


def _one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Returns the last token, which sees all keys except for a mask: (B, 1, N, H).

    The heads that share a key stand for queries, so that it is read once for all of them.
    """
    batch, _, heads, width = query.shape
    groups = key.shape[2]
    some = allowed = None
    if mask is not None:
        allowed = as_tensor(mask).to(torch.bool)
        allowed = allowed[(None,) * (4 - allowed.ndim)]
        # A row of nothing sees all, and is zeroed below.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
        if allowed.shape[1] > 1:
            allowed = allowed.reshape(-1, groups, heads // groups, allowed.shape[3])
    output = functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, width),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=allowed,
        scale=scale,
    ).reshape(batch, 1, heads, width)
    if some is None:
        return output
    return torch.where(some.transpose(1, 2), output, output.new_zeros(()))


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
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


def _fused(output: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Returns the result of SDPA, with second derivatives, which its kernels lack."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return _Fused.apply(output, *arguments)


def _fused_again(ctx: Context) -> Any:
    query, key, value, mask, segments = ctx.saved_tensors
    *options, rate = ctx.options
    if rate:
        raise InputError(
            "attention: a fused kernel does not tell what it dropped, so there is no second "
            "derivative; compute it without dropout, or in kmodels.generic_only('attention')"
        )

    def function(
        _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return _plain(query, key, value, mask, segments, *options)

    return (None, query, key, value), function


class _Fused(torch.autograd.Function):
    """Lets gradients through to SDPA, or where a graph of them is asked for goes around it."""

    @staticmethod
    def forward(
        ctx: Context,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        segments: torch.Tensor | None,
        *options: object,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask, segments)
        ctx.options = options
        return output.view_as(output)

    @staticmethod
    @backward(_fused_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], *[None] * (len(ctx.needs_input_grad) - 1)


def _products_again(ctx: Context) -> Any:
    query, key, value, mask, segments, kept, *_ = ctx.saved_tensors
    options = mask, segments, ctx.causal, ctx.window, ctx.scale, kept, ctx.share
    return (query, key, value), lambda q, k, v: _plain(q, k, v, *options)


class _NoContext:
    """Takes what a forward pass keeps for a backward pass that does not come."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        pass


def _forward_alone(*arguments: Any) -> torch.Tensor:
    return _Products.forward(cast(Context, _NoContext()), *arguments)


class _Products(torch.autograd.Function):
    """softmax(query @ key.T) @ value, block by block; keeps the weights, and a byte of dropout.

    It goes through as many texts or images at a time as have scores that stay near the processor.
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
        causal: bool,
        window: int | None,
        scale: float,
        kept: torch.Tensor | None,
        share: float,
    ) -> torch.Tensor:
        (batch, length, heads, _), (_, keys, groups, _) = query.shape, key.shape
        shared = heads // groups
        ctx.scale, ctx.share, ctx.shared = scale, share, shared
        # 64 queries in float32 and 128 in bfloat16 were measured to be the best.
        size = 256 // query.dtype.itemsize
        ctx.blocks = blocks(length, keys, causal, window, size)
        ctx.parts = slices(batch, NEAR // (heads * length * keys))
        if kept is not None:
            kept = kept.view(batch, groups, length * shared, keys)
        output, saved = torch.empty_like(query, memory_format=torch.contiguous_format), []
        for part in ctx.parts:
            q, k, v = as_rows(query[part], shared), heads_first(key[part]), heads_first(value[part])
            hidden = of_part(mask, part), of_part(segments, part)
            blocks_of_part = []
            for queries, seen in ctx.blocks:
                rows = rows_of(queries, shared)
                scores = scaled_product(q[:, rows], k[:, seen].transpose(1, 2), scale)
                near_keys = (queries, seen, keys - length)
                weights = weights_of(scores, hidden, near_keys, causal, window, (groups, shared))
                saved.append(weights)
                if kept is not None:
                    weights = weights * kept[part, :, rows, seen].flatten(0, 1)
                blocks_of_part.append(scaled_product(weights, v[:, seen], share))
            output[part] = as_heads(joined(blocks_of_part), groups, shared)
        ctx.causal, ctx.window = causal, window
        ctx.save_for_backward(query, key, value, mask, segments, kept, *saved)
        return output

    @staticmethod
    @backward(_products_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, _, kept, *saved = ctx.saved_tensors
        found = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )
        groups, shared, left = key.shape[2], ctx.shared, iter(saved)
        alone = ctx.blocks == [(slice(0, query.shape[1]), slice(0, key.shape[1]))]
        for part in ctx.parts:
            q, k, v = as_rows(query[part], shared), heads_first(key[part]), heads_first(value[part])
            gradient = as_rows(gradients[0][part], shared)
            totals: list[torch.Tensor] = []
            for queries, seen in ctx.blocks:
                rows, weights = rows_of(queries, shared), next(left)
                slope = scaled_product(gradient[:, rows], v[:, seen].transpose(1, 2), ctx.share)
                dropped = weights
                if kept is not None:
                    stays = kept[part, :, rows, seen].flatten(0, 1)
                    dropped, slope = weights * stays, slope.mul_(stays)
                slope = internals_torch.softmax_backward(slope, weights)
                of_block = (
                    scaled_product(slope, k[:, seen], ctx.scale),
                    scaled_product(slope.transpose(1, 2), q[:, rows], ctx.scale),
                    scaled_product(dropped.transpose(1, 2), gradient[:, rows], ctx.share),
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
