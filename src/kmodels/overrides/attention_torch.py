"""Attention for torch, by the fastest kernel that was measured.

On CUDA, `choose` in `_attention_cuda_torch` picks the kernel; none was measured there yet.
`scaled_dot_product_attention` never holds all attention weights. On CPUs it is slower in half
precision, with dropout, and with a causal mask, of which it computes both halves. There, matrix
products compute one block of queries at a time, with a backward pass written here.
"""

from functools import partial
from typing import Any, NamedTuple, cast
from weakref import ref

import keras
import torch
from torch.nn import functional

from kmodels.core import internals_torch, seeds_torch
from kmodels.core.dispatch import OpCall, override
from kmodels.core.errors import InputError
from kmodels.ops.attention import (
    MASKED,
    allowed_pairs,
    attention,
    block_slices,
    check_attention,
    check_ids,
    near_pairs,
)
from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides._attention_cuda_torch import Facts, choose, repeats_keys
from kmodels.overrides._backward_torch import Context, backward, with_second_derivatives
from kmodels.overrides._tensors_torch import as_tensor, widens
from kmodels.overrides.dropout_torch import Draw

# Keys from which SDPA is used on CPUs too, if it needs no mask of queries times keys.
LONG = 1024
# Keys up to which SDPA with a causal mask is faster in float32 than the calls of products.
SHORT = 64
# Tokens from which products recompute their weights, which have the size of queries times keys.
KEPT = 1024
# Scores that are computed at a time: 0.5 MB in bfloat16, which fits the cache of a core.
NEAR = 2**18


def supports(call: OpCall) -> str | None:
    """Supports all but image blocks, seeds without a generator, and some soft caps."""
    query, drops = as_tensor(call.query), call.dropout and call.seed is not None
    if on_cuda(query) and query.shape[1] > 1:
        choice = choose(known(call))
        return choice.reason if choice.kernel == "generic" else None
    if widens(query) and query.shape[1] > 1:
        return None
    if call.block_ids is not None:
        return "image blocks are left to the op's own body"
    if drops and not isinstance(call.seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if drops and query.dtype == torch.float16 and query.device.type == "cpu":
        return "products would have their scores in float16"
    if call.soft_cap is not None and not on_cpu(query):
        return "scaled_dot_product_attention has no soft cap"
    if torch.compiler.is_compiling():
        far = call.window is not None or call.segment_ids is not None
        products = by_products(query, call.key, call.causal, call.dropout, far)
        if products or call.soft_cap is not None:
            return "on CPU, the compiler makes products of the op itself"
    return None


def known(call: OpCall) -> Facts:
    """Returns the facts that the choice of a kernel on CUDA depends on."""
    return cuda.facts(
        as_tensor(call.query),
        as_tensor(call.key),
        causal=call.causal,
        window=call.window,
        soft_cap=call.soft_cap,
        drops=bool(call.dropout) and call.seed is not None,
        mask=call.mask,
        segments=call.segment_ids,
        blocks=call.block_ids,
    )


def on_cuda(query: torch.Tensor) -> bool:
    """Returns True if a tensor is on CUDA."""
    return query.is_cuda


def on_cpu(query: torch.Tensor) -> bool:
    """Returns True on a CPU, except for float16, whose range is too small for products."""
    return query.device.type == "cpu" and query.dtype != torch.float16


def by_products(
    query: torch.Tensor, key: torch.Tensor, causal: bool, rate: float, far: bool = False
) -> bool:
    """Returns True if products beat SDPA; `far` is True if windows or segments hide pairs.

    Source: `benchmarks/results/ops_torch_attention-cpu_*.json`.
    """
    if not on_cpu(query):
        return False
    if rate:
        return True
    if not far and key.shape[1] <= SHORT and query.dtype.itemsize >= 4:
        return False
    if key.shape[1] >= LONG:
        return far or query.dtype.itemsize < 4  # SDPA needs a mask of what is far
    return causal or query.dtype.itemsize < 4


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
    """Scales inside the kernel; a query that sees nothing gets zeros, as in the op."""
    check_attention(query, key, value, causal, window, soft_cap, dropout)
    check_ids(query, key, causal, segment_ids, block_ids)
    query, key, value = as_tensor(query), as_tensor(key), as_tensor(value)
    mask = None if mask is None else as_tensor(mask)
    segments = None if segment_ids is None else as_tensor(segment_ids)
    length, keys = query.shape[1], key.shape[1]
    if length == 1 and segments is not None:  # a row of the mask is all that it hides
        mask, segments = allowed_pairs(query, key, mask, False, None, segments), None
    if length == 1 and window is None and soft_cap is None and (not dropout or seed is None):
        output = _one_query(query, key, value, mask, scale)
        return _fused(output, query, key, value, mask, None, False, None, scale, 0.0)
    if widens(query):
        options = {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}
        hidden = {"segment_ids": segments, "block_ids": block_ids}
        dropped = {"dropout": dropout, "seed": seed}
        return in_float32(query, key, value, mask, **options, **hidden, **dropped)
    far = window is not None or segments is not None
    rate = dropout if seed is not None else 0.0
    if on_cuda(query):
        facts = cuda.facts(
            query,
            key,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
            drops=bool(rate),
            mask=mask,
            segments=segments,
            blocks=block_ids,
        )
        kernel = choose(facts).kernel
        if kernel in ("varlen", "flex"):
            inputs = query, key, value
            output = _on_cuda(kernel, facts, inputs, segments, block_ids, scale, soft_cap)
            op: Any = attention
            options = {"causal": causal, "window": window, "scale": scale, "soft_cap": soft_cap}
            again = partial(op.generic, **options, segment_ids=segments, block_ids=block_ids)
            return with_second_derivatives(output, inputs, again)
        if repeats_keys(facts):
            shared = query.shape[2] // key.shape[2]
            key, value = (x.repeat_interleave(shared, 2) for x in (key, value))
    if soft_cap is not None or by_products(query, key, causal, rate, far):
        factor = query.shape[3] ** -0.5 if scale is None else scale
        if mask is not None:
            mask = allowed_pairs(query, key, mask, False, None)
        is_long = length * keys > KEPT**2
        again = soft_cap is not None or is_long
        drawn = Kept(query, key, rate, seed, is_long) if rate else None  # type: ignore[arg-type]
        products = _Products.apply if torch.is_grad_enabled() else forward_alone
        options = Options(causal, window, factor, soft_cap, again)
        return products(query, key, value, mask, segments, options, drawn)
    # torch aligns its own causal mask to the first key, the op to the last.
    hides = mask is not None or window is not None or segments is not None
    aligned = causal and not hides and length == keys
    allowed = some = None
    if not aligned and (hides or causal):
        allowed = allowed_pairs(query, key, mask, causal, window, segments)
    if mask is not None and allowed is not None:
        # Kernels differ for a row that sees nothing; it sees all here and becomes zero later.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
    if rate and seed is not None and not torch.compiler.is_compiling():
        # The kernel draws from torch's global generator: key it by the SeedGenerator's state, so
        # that a resumed run repeats. Compiled code cannot, and draws from the global state.
        words = seeds_torch.take(seed)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
            torch.manual_seed(seeds_torch.mixed(*words))
            output = _kernel(query, key, value, allowed, rate, aligned, scale)
    else:
        output = _kernel(query, key, value, allowed, rate, aligned, scale)
    if some is not None:
        output = torch.where(some, output, output.new_zeros(()))
    output = output.transpose(1, 2)
    return _fused(output, query, key, value, mask, segments, causal, window, scale, rate)


def in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: object, **options: Any
) -> torch.Tensor:
    """Computes the op in float32; the backward pass keeps the inputs in half precision."""
    op: Any = attention
    narrow = query, key, value
    inputs = [x.float() for x in narrow]
    if torch.compiler.is_compiling():
        return op.generic(*inputs, *arguments, **options).to(query.dtype)
    call = op.generic if op.declines(*inputs, *arguments, **options) else op.override
    if not torch.is_grad_enabled():
        return call(*inputs, *arguments, **options).to(query.dtype)

    def pack(x: torch.Tensor) -> torch.Tensor:
        """Returns the narrow tensor, which exists anyway, in place of its float32 copy."""
        for kept, given in zip(narrow, inputs, strict=True):
            if x.data_ptr() == given.data_ptr() and x.shape[-1:] == given.shape[-1:]:
                for view, like in ((kept, given), (kept.transpose(1, 2), given.transpose(1, 2))):
                    if x.shape == like.shape and x.stride() == like.stride():
                        return view
        return x

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype == query.dtype else x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return call(*inputs, *arguments, **options).to(query.dtype)


def _on_cuda(
    kernel: str,
    facts: Facts,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    segments: torch.Tensor | None,
    block_ids: torch.Tensor | None,
    scale: float | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Runs a kernel for windows, segments, image blocks or soft caps."""
    if kernel == "varlen" and facts.window is not None:
        return cuda.varlen(*inputs, facts.window, scale)
    blocks = None if block_ids is None else as_tensor(block_ids)
    device = inputs[0].device
    mask = cuda.mask_of(facts.lengths, facts.causal, facts.window, segments, blocks, device)
    return cuda.flex(*inputs, mask, soft_cap, scale)


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
    allowed, some = (None, None) if mask is None else _seen(mask, query.dtype)
    if allowed is not None and allowed.shape[1] > 1:
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


class _Seen(NamedTuple):
    """The cached result of `_seen`: all blocks of a model get the same mask."""

    mask: ref[torch.Tensor]
    version: int
    dtype: torch.dtype
    added: torch.Tensor
    some: torch.Tensor | None


_last: list[_Seen] = []


def _seen(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a mask to add to scores (B or 1, N or 1, 1, S), and the rows that see any key.

    SDPA would make the same numbers from a bool mask in each block. A row that sees nothing sees
    all keys in it, and the caller sets its output to zero. The second result is None if all rows
    see a key, which is read on CPUs only: a GPU would have to wait.
    """
    stays = not (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or type(mask) is not torch.Tensor
        or internals_torch.in_transform()
    )
    version = internals_torch.version_of(mask) if stays else 0
    if stays and _last and _last[0].mask() is mask:
        last = _last[0]
        if last.version == version and last.dtype is dtype:
            return last.added, last.some
    allowed = mask.to(torch.bool)
    allowed = allowed[(None,) * (4 - allowed.ndim)]
    some: torch.Tensor | None = allowed.any(-1, keepdim=True)
    if stays and not on_cuda(mask) and some is not None and bool(some.all()):
        some = None
    else:
        allowed = allowed | ~some
    added = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)
    if stays:
        _last[:] = [_Seen(ref(mask), version, dtype, added, some)]
    return added, some


def _fused(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    rate: float,
) -> torch.Tensor:
    """Returns the result of SDPA with second derivatives, which its kernels lack."""

    def again(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if rate:
            raise InputError(
                "attention: second derivatives are not supported with dropout in a fused kernel; "
                "set dropout=0, or compute it in kmodels.generic_only('attention')"
            )
        return plain(query, key, value, mask, segments, causal, window, scale)

    return with_second_derivatives(output, (query, key, value), again)


class Options(NamedTuple):
    """Options of the products, as in `kmodels.ops.attention`."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    again: bool  # whether a backward pass computes the weights again


class Kept:
    """Dropout masks of the weights (B, K, T * G, S): drawn at once, or for each block again.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        rate: rate of the dropout.
        seed: generator of the dropout; its state advances.
        again: whether each block is drawn when it is needed, so that no mask is kept.
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

    def all(self, parts: list[slice], cut: list[tuple[slice, slice]], shared: int) -> torch.Tensor:
        """Returns all bytes (B, K, T * G, S), for a second derivative."""
        if self.whole is not None:
            return self.whole
        found = torch.zeros(self.shape, dtype=torch.uint8)
        for part in parts:
            for queries, seen in cut:
                rows = _rows_of(queries, shared)
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
    """Computes attention by plain operations, which autograd can differentiate repeatedly."""
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
    """Context of a forward pass without a backward pass."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        pass


def forward_alone(*arguments: Any) -> torch.Tensor:
    """Returns the result of `_Products` without gradients."""
    return _Products.forward(cast(Context, _NoContext()), *arguments)


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
        found = near_pairs(queries, seen, ahead, options.causal, options.window)
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
    # A query that sees nothing has uniform weights here; they become zero.
    weights.view_as(heads).mul_(allowed.any(-1, keepdim=True))
    return weights.to(query.dtype), slopes


class _Products(torch.autograd.Function):
    """softmax(query @ key.T) @ value, block by block.

    It keeps the weights and a byte of dropout for each; for long texts it recomputes both. It
    computes as many texts or images at a time as have scores that fit the cache. Queries are stored
    as (b * K, T * G, H): the G heads that share a key are adjacent, so that a key head is read once
    for all of them.
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
        # If weights are recomputed, texts without a mask are cut too.
        ctx.blocks = block_slices(length, keys, options.causal, options.window, size, options.again)
        ctx.parts = slices(batch, NEAR // (heads * length * keys))
        share = 1.0 if kept is None else kept.share
        output, saved = torch.empty_like(query, memory_format=torch.contiguous_format), []
        for part in ctx.parts:
            q, k, v = as_rows(query[part], shared), heads_first(key[part]), heads_first(value[part])
            hidden = of_part(mask, part), of_part(segments, part)
            blocks_of_part = []
            for queries, seen in ctx.blocks:
                rows = _rows_of(queries, shared)
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
                rows, slopes = _rows_of(queries, shared), None
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


def _rows_of(queries: slice, shared: int) -> slice:
    return slice(queries.start * shared, queries.stop * shared)


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale * a @ b, scaled before it is rounded."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0, alpha=scale)
