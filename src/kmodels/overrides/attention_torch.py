"""Attention for torch by its kernels, none of which holds all attention weights.

On CUDA, `choose` in `_attention_cuda_torch` picks the kernel; none was measured there yet. On CPUs
`scaled_dot_product_attention` serves the calls for which its kernel stays fused; the op's own body
serves the others.
"""

from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import keras
import torch
from torch.nn import functional

from kmodels.core import internals_torch, seeds_torch
from kmodels.core.dispatch import OpCall, override
from kmodels.core.errors import InputError
from kmodels.ops.attention import Hidden, allowed_pairs, attention, check_attention, hiding_window
from kmodels.overrides import _attention_cuda_torch as cuda
from kmodels.overrides._attention_cuda_torch import choose, repeats_keys
from kmodels.overrides._backward_torch import with_second_derivatives
from kmodels.overrides._tensors_torch import as_tensor, widens

# Keys from which SDPA is faster on CPUs in half precision too, and from which the op's own body
# cuts texts into blocks, whose mask is smaller than SDPA's mask of queries times keys.
LONG = 1024


def supports(call: OpCall) -> str | None:
    """Supports the calls that a kernel was measured to serve best."""
    query, drops = as_tensor(call.query), call.dropout and call.seed is not None
    if query.shape[1] > 1:
        if on_cuda(query):
            choice = choose(cuda.facts(call))
            return choice.reason if choice.kernel == "generic" else None
        if widens(query):
            return None
    if call.block_ids is not None:
        return "image blocks are left to the op's own body"
    if drops and not isinstance(call.seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if call.soft_cap is not None:
        return "scaled_dot_product_attention has no soft cap"
    if query.device.type != "cpu" or on_cuda(query):
        return None
    if drops:
        return "with dropout scaled_dot_product_attention holds all weights on a CPU"
    if query.shape[1] == 1:
        return None
    if call.key.shape[1] < LONG:
        narrow = query.dtype.itemsize < 4
        return "in half precision products of short texts are faster on a CPU" if narrow else None
    if hiding_window(call.window, query, call.key) is not None or call.segment_ids is not None:
        return "scaled_dot_product_attention would take a mask of queries times keys"
    return None


def on_cuda(query: torch.Tensor) -> bool:
    """Returns True if a tensor is on CUDA."""
    return query.is_cuda


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
    hidden = Hidden(mask, segment_ids, block_ids, causal, window)
    check_attention(query, key, value, hidden, soft_cap, dropout)
    query, key, value = as_tensor(query), as_tensor(key), as_tensor(value)
    mask = None if mask is None else as_tensor(mask)
    segments = None if segment_ids is None else as_tensor(segment_ids)
    if query.shape[1] == 1 and segments is not None:  # for one query, segments are a mask of a row
        mask, segments = allowed_pairs(query, key, Hidden(mask, segments)), None
    rate = 0.0 if seed is None else dropout
    if query.shape[1] == 1 and window is None and soft_cap is None and not rate:
        output = _one_query(query, key, value, mask, scale)
        return _fused(output, (query, key, value), 0.0, {"mask": mask, "scale": scale})
    options = {
        "mask": mask,
        "causal": causal,
        "window": hiding_window(window, query, key),
        "segment_ids": segments,
        "block_ids": None if block_ids is None else as_tensor(block_ids),
        "scale": scale,
        "soft_cap": soft_cap,
    }
    if widens(query):
        return in_float32(query, key, value, **options, dropout=rate, seed=seed)
    bind: Any = attention.bind
    call = bind(query, key, value, **options, dropout=rate, seed=seed)
    output = _on_cuda(call) if on_cuda(query) else _sdpa(call)
    return _fused(output, (query, key, value), rate, options)


def in_float32(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Computes the op in float32; the backward pass keeps the inputs in half precision."""
    narrow = query, key, value
    inputs = [x.float() for x in narrow]
    op: Any = attention
    is_compiled = torch.compiler.is_compiling()
    body = op.generic if is_compiled or op.declines(*inputs, **options) else op.override
    if is_compiled or not torch.is_grad_enabled():
        return body(*inputs, **options).to(query.dtype)

    def pack(x: torch.Tensor) -> torch.Tensor:
        """Returns the narrow tensor, which exists anyway, in place of its float32 copy."""
        for narrow_one, whole in zip(narrow, inputs, strict=True):
            if x.data_ptr() == whole.data_ptr() and x.shape[-1:] == whole.shape[-1:]:
                for view, like in (
                    (narrow_one, whole),
                    (narrow_one.transpose(1, 2), whole.transpose(1, 2)),
                ):
                    if x.shape == like.shape and x.stride() == like.stride():
                        return view
        return x

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype == query.dtype else x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return body(*inputs, **options).to(query.dtype)


def _on_cuda(call: OpCall) -> torch.Tensor:
    """Runs the chosen kernel of CUDA; (B, T, N, H)."""
    facts = cuda.facts(call)
    kernel, inputs = choose(facts).kernel, (call.query, call.key, call.value)
    if kernel == "varlen" and facts.window is not None:
        return cuda.varlen(*inputs, facts.window, call.scale)
    if kernel == "flex":
        return cuda.flex(*inputs, cuda.mask_of(call), call.soft_cap, call.scale)
    return _sdpa(call, repeats_keys(facts))


def _sdpa(call: OpCall, repeats: bool = False) -> torch.Tensor:
    """Runs torch's attention, whose causal mask is aligned to the first key; (B, T, N, H).

    With `repeats` keys and values are repeated for each query head.
    """
    query, key, value, rate = call.query, call.key, call.value, call.dropout
    if repeats:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    hides = any(x is not None for x in (call.mask, call.window, call.segment_ids))
    # The op's causal mask is aligned to the last key.
    aligned = call.causal and not hides and query.shape[1] == key.shape[1]
    allowed = some = None
    if not aligned and (hides or call.causal):
        hidden = Hidden(call.mask, call.segment_ids, None, call.causal, call.window)
        allowed = allowed_pairs(query, key, hidden)
    if call.mask is not None and allowed is not None:
        # Kernels differ for a row that sees nothing; it sees all here and becomes zero later.
        some = allowed.any(-1, keepdim=True)
        allowed = allowed | ~some
    run = partial(_kernel, query, key, value, allowed, rate, aligned, call.scale)
    if rate and not torch.compiler.is_compiling():
        # The kernel draws from torch's global generator: key it by the SeedGenerator's state, so
        # that a resumed run repeats. Compiled code cannot, and draws from the global state.
        words = seeds_torch.take(call.seed)
        with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
            torch.manual_seed(seeds_torch.mixed(*words))
            output = run()
    else:
        output = run()
    if some is not None:
        output = torch.where(some, output, output.new_zeros(()))
    return output.transpose(1, 2)


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
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rate: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """Returns the result of a kernel with second derivatives, which kernels lack."""
    generic: Any = attention.generic

    def again(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if rate:
            raise InputError(
                "attention: second derivatives are not supported with dropout in a fused kernel; "
                "set dropout=0, or compute it in kmodels.generic_only('attention')"
            )
        return generic(query, key, value, **options)

    return with_second_derivatives(output, inputs, again)
