"""Attention for torch, by the kernel that was measured to be the fastest.

`scaled_dot_product_attention` never holds all attention weights. On CPUs it is the slower one in
half precision, with dropout and under a causal mask, of which it computes both halves; there matrix
products do it, a block of queries after the other, with a backward pass of their own.
"""

from typing import Any

import keras
import numpy as np
import torch
from torch.nn import functional

from kmodels.dispatch import Tensor, override
from kmodels.ops.attention import MASKED, allowed_pairs, attention, check_attention
from kmodels.overrides.blocks import blocks, near
from kmodels.overrides.dropout_torch import keep
from kmodels.tensors_torch import as_tensor

# Keys from which SDPA is taken on CPUs too: the products hold length x keys weights.
LONG = 1024


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> str | None:
    """Everything but soft caps, and seeds that are no generator."""
    if soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if dropout and seed is not None and not isinstance(seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if torch.compiler.is_compiling() and by_products(query, key, causal, dropout):
        return "on CPU, the compiler makes products of the op itself"
    return None


def by_products(query: Tensor, key: Tensor, causal: bool, rate: float) -> bool:
    """Whether products beat SDPA, by `benchmarks/results/ops_torch_attention-cpu_*.json`."""
    if query.device.type != "cpu":
        return False
    if rate:
        return True
    return key.shape[1] < LONG and (causal or query.dtype.itemsize < 4)


@override(attention, supports)
def attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed: keras.random.SeedGenerator | Tensor | None = None,
) -> Tensor:
    """Scales inside the kernel only; masks that leave a query nothing give zeros, as in the op."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    query, key, value = (as_tensor(x) for x in (query, key, value))
    length, keys = query.shape[1], key.shape[1]
    if length == 1 and window is None and (not dropout or seed is None):
        return _one_query(query, key, value, mask, scale)
    if by_products(query, key, causal, dropout if seed is not None else 0.0):
        kept, share = None, 1.0
        if dropout and seed is not None:
            kept, share = keep(seed, query.shape[0] * length * query.shape[2] * keys, dropout)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        if mask is not None:
            mask = allowed_pairs(query, key, mask, False, None)
        return _Products.apply(query, key, value, mask, causal, window, scale, kept, share)
    # torch aligns its own causal mask to the first key, the op to the last.
    aligned = causal and mask is None and window is None and length == keys
    allowed = None if aligned else allowed_pairs(query, key, mask, causal, window)
    some = None
    if mask is not None and allowed is not None:
        # What a kernel does with a row of nothing differs; let such a row see all, then zero it.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
    rate = dropout if seed is not None else 0.0
    if rate and seed is not None and not torch.compiler.is_compiling():
        # The kernel draws from torch's global generator: key it by the SeedGenerator's state, so
        # that a resumed run repeats. Compiled code cannot, and draws from the global state.
        words = [word & 0xFFFFFFFF for word in seed.next().tolist()]
        # On CPU torch reads 32 bits of a seed, so both words have to reach each of them.
        mixed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
            torch.manual_seed(mixed)
            output = _kernel(query, key, value, allowed, rate, aligned, scale)
    else:
        output = _kernel(query, key, value, allowed, rate, aligned, scale)
    if some is not None:
        output = torch.where(some, output, output.new_zeros(()))
    return output.transpose(1, 2)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    rate: float,
    aligned: bool,
    scale: float | None,
) -> Tensor:
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
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """The last token, which sees all keys but for a mask: (B, 1, N, H).

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


class _Products(torch.autograd.Function):
    """softmax(query @ key.T) @ value, block by block; keeps the weights, and a byte of dropout.

    Inside, queries lie as (B * K, T * G, H): the G heads that share a key follow each other, so
    that a key head is read once for all of them, and nothing is copied where there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
        kept: Tensor | None,
        share: float,
    ) -> Tensor:
        ctx.sizes = (*key.shape[:3], query.shape[1], query.shape[2] // key.shape[2])
        ctx.scale, ctx.share = scale, share
        # 64 queries in float32 and 128 in bfloat16 were measured to be the best.
        size = 256 // query.dtype.itemsize
        ctx.blocks = blocks(query.shape[1], key.shape[1], causal, window, size)
        query, key, value = _rows(query, ctx.sizes), _heads_first(key), _heads_first(value)
        batch, keys, groups, length, shared = ctx.sizes
        if kept is not None:
            kept = kept.view(batch * groups, length * shared, keys)
        output, saved, masks = torch.empty_like(query), [], []
        for queries, seen in ctx.blocks:
            rows = _rows_of(queries, shared)
            scores = _scaled_product(query[:, rows], key[:, seen].transpose(1, 2), scale)
            weights = _softmax(scores, mask, queries, seen, causal, window, ctx.sizes)
            saved.append(weights)
            if kept is not None:
                masks.append(kept[:, rows, seen])
                weights = weights * masks[-1]
            output[:, rows] = _scaled_product(weights, value[:, seen], ctx.share)
        ctx.save_for_backward(query, key, value, *saved, *masks)
        return _back(output, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        count = len(ctx.blocks)
        saved, masks = saved[:count], saved[count:] or [None] * count
        gradient = _rows(gradients[0], ctx.sizes)
        for_query = torch.empty_like(query)
        for_key, for_value = torch.zeros_like(key), torch.zeros_like(value)
        for (queries, seen), weights, kept in zip(ctx.blocks, saved, masks, strict=True):
            rows = _rows_of(queries, ctx.sizes[4])
            part = gradient[:, rows]
            slope = _scaled_product(part, value[:, seen].transpose(1, 2), ctx.share)
            left = weights
            if kept is not None:
                left, slope = weights * kept, slope.mul_(kept)
            for_value[:, seen].baddbmm_(left.transpose(1, 2), part, alpha=ctx.share)
            slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
            for_query[:, rows] = _scaled_product(slope, key[:, seen], ctx.scale)
            for_key[:, seen].baddbmm_(slope.transpose(1, 2), query[:, rows], alpha=ctx.scale)
        found = (
            _back(for_query, ctx.sizes),
            *(
                x.view(ctx.sizes[0], ctx.sizes[2], *x.shape[1:]).transpose(1, 2)
                for x in (for_key, for_value)
            ),
        )
        return (*found, None, None, None, None, None, None)


Sizes = tuple[int, int, int, int, int]  # B, S, K, T, G


def _rows(x: Tensor, sizes: Sizes) -> Tensor:
    """(B, T, K * G, H) -> (B * K, T * G, H)."""
    batch, _, groups, length, shared = sizes
    split = x.reshape(batch, length, groups, shared, x.shape[-1])
    return split.permute(0, 2, 1, 3, 4).reshape(batch * groups, length * shared, x.shape[-1])


def _back(x: Tensor, sizes: Sizes) -> Tensor:
    """(B * K, T * G, H) -> (B, T, K * G, H)."""
    batch, _, groups, length, shared = sizes
    split = x.view(batch, groups, length, shared, x.shape[-1])
    return split.permute(0, 2, 1, 3, 4).reshape(batch, length, groups * shared, x.shape[-1])


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, K, H) -> (B * K, S, H)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _rows_of(queries: slice, shared: int) -> slice:
    return slice(queries.start * shared, queries.stop * shared)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Scale * a @ b, scaled before it is rounded."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)


def _softmax(
    scores: Tensor,
    mask: Tensor | None,
    queries: slice,
    seen: slice,
    causal: bool,
    window: int | None,
    sizes: Sizes,
) -> Tensor:
    """Attention weights of a block of scores (B * K, t * G, s); the scores are used up."""
    batch, keys, groups, length, shared = sizes
    heads = scores.view(batch, groups, -1, shared, scores.shape[2])
    close = None
    if causal or window is not None:
        found = near((queries, seen), keys - length, causal, window)
        close = torch.from_numpy(found).to(scores.device)[:, None]
        # Under a causal mask alone, the keys before the block's first query need none.
        start = 0 if window is not None else queries.start + keys - length - seen.start
        heads[..., start:].masked_fill_(~close[..., start:], MASKED)
    if mask is None:
        return torch.softmax(scores, -1)
    # (B or 1, N or 1, T or 1, S or 1) -> (B or 1, K or 1, T or 1, G or 1, S or 1)
    split = (groups, shared) if mask.shape[1] > 1 else (1, 1)
    allowed = mask.reshape(mask.shape[0], *split, *mask.shape[2:]).transpose(2, 3)
    allowed = allowed[:, :, queries if allowed.shape[2] > 1 else slice(None)]
    allowed = allowed[..., seen if allowed.shape[4] > 1 else slice(None)]
    heads.masked_fill_(~allowed, MASKED)
    if close is not None:
        allowed = allowed & close
    weights = torch.softmax(scores, -1)
    # A query that sees nothing has even weights by now; it gets none.
    weights.view_as(heads).mul_(allowed.any(-1, keepdim=True))
    return weights
