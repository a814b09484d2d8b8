"""Attention for torch, by the kernel that was measured to be the fastest.

On CUDA `choose` of `_attention_cuda_torch` says which kernel serves; none was measured there yet.
`scaled_dot_product_attention` never holds all attention weights. On CPUs it is the slower one in
half precision, with dropout and under a causal mask, of which it computes both halves; there matrix
products do it, a block of queries after the other, with a backward pass of their own.
"""

from typing import Any, NamedTuple
from weakref import ref

import keras
import torch
from torch.nn import functional

from kmodels.core import internals_torch, seeds_torch
from kmodels.core.dispatch import OpCall, override
from kmodels.core.errors import InputError
from kmodels.ops._attention_blockwise import allowed_pairs
from kmodels.ops.attention import attention, check_attention, check_ids
from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides._attention_blocks_torch import Kept, Options, Products, forward_alone, plain
from kmodels.overrides._attention_cuda_torch import Facts, choose, repeats_keys
from kmodels.overrides._backward_torch import Context, backward
from kmodels.overrides._tensors_torch import as_tensor, widens

# Keys from which SDPA is taken on CPUs too, where it needs no mask of length x keys.
LONG = 1024
# Keys up to which a causal mask costs SDPA less in float32 than products cost in calls of torch.
SHORT = 64
# Tokens from which on products compute their weights again: keeping them takes length x keys.
KEPT = 1024


def supports(call: OpCall) -> str | None:
    """Serves everything but image blocks, seeds that are not a generator, some soft caps."""
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
    """Returns what the choice of a kernel on CUDA depends on."""
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
    """Returns whether the kernels of CUDA serve where a tensor lies."""
    return query.is_cuda


def on_cpu(query: torch.Tensor) -> bool:
    """Returns whether products can serve, which float16's range cannot."""
    return query.device.type == "cpu" and query.dtype != torch.float16


def by_products(
    query: torch.Tensor, key: torch.Tensor, causal: bool, rate: float, far: bool = False
) -> bool:
    """Returns whether products beat SDPA; `far` says that windows or segments hide pairs.

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
    """Scales inside the kernel only; masks that leave a query nothing give zeros, as in the op."""
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
        call: Any = attention.bind
        hidden = {"segment_ids": segments, "block_ids": block_ids}
        options = {"causal": causal, "window": window, **hidden, "soft_cap": soft_cap}
        facts = known(call(query, key, value, mask, **options, dropout=dropout, seed=seed))
        kernel = choose(facts).kernel
        if kernel in ("varlen", "flex"):
            inputs = query, key, value
            output = _on_cuda(kernel, facts, inputs, segments, block_ids, scale, soft_cap)
            return cuda.again(output, inputs, {**options, "scale": scale})
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
        products = Products.apply if torch.is_grad_enabled() else forward_alone
        options = Options(causal, window, factor, soft_cap, again)
        return products(query, key, value, mask, segments, options, drawn)
    # torch aligns its own causal mask to the first key, the op to the last.
    hides = mask is not None or window is not None or segments is not None
    aligned = causal and not hides and length == keys
    allowed = some = None
    if not aligned and (hides or causal):
        allowed = allowed_pairs(query, key, mask, causal, window, segments)
    if mask is not None and allowed is not None:
        # Kernels differ in what they do with a row of nothing; let such a row see all, then zero
        # it.
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
    """Returns the op of the same numbers in float32, of which half precision is kept."""
    op: Any = attention
    narrow = query, key, value
    inputs = [x.float() for x in narrow]
    if torch.compiler.is_compiling():
        return op.generic(*inputs, *arguments, **options).to(query.dtype)
    call = op.generic if op.declines(*inputs, *arguments, **options) else op.override
    if not torch.is_grad_enabled():
        return call(*inputs, *arguments, **options).to(query.dtype)

    def pack(x: torch.Tensor) -> torch.Tensor:
        """Returns the narrow tensor, which is there anyway, in place of one of the inputs."""
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
    """Returns what a kernel for windows, segments, image blocks or soft caps gives."""
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
    """What `_seen` made of the last mask: all blocks get the same one for a token."""

    mask: ref[torch.Tensor]
    version: int
    dtype: torch.dtype
    added: torch.Tensor
    some: torch.Tensor | None


_last: list[_Seen] = []


def _seen(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a mask (B or 1, N or 1, 1, S) whose rows all see something, and those that do.

    It is of numbers that are added to scores, which SDPA would make of a bool mask in each block. A
    row of nothing sees all in it, for the caller to set to zero. None says that all rows do see
    something; only on CPUs is that known at once.
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
        return plain(query, key, value, mask, segments, *options)

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
