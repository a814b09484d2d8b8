"""Kernels of torch for attention on CUDA, each called through one thin function.

Tests put a recorder or a body for CPUs in their place. Shapes are those of `ops.attention`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.nn.attention import flex_attention as flexible

from kmodels.core import internals_torch
from kmodels.ops.attention import attention
from kmodels.overrides._attention_choice_torch import Facts
from kmodels.overrides._backward_torch import Context, backward


def facts(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    drops: bool,
    **hidden: object,
) -> Facts:
    """Returns what is known of a call; `hidden` are the mask, the segments and the blocks."""
    if window is not None and max(query.shape[1], key.shape[1]) <= window:
        window = None  # it hides nothing
    return Facts(
        query.dtype,
        (query.shape[1], key.shape[1]),
        (query.shape[2], key.shape[2]),
        query.shape[3],
        causal=causal,
        window=window,
        hidden=frozenset(name for name, x in hidden.items() if x is not None),
        soft_cap=soft_cap is not None,
        drops=drops,
        compiled=torch.compiler.is_compiling(),
    )


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float | None
) -> torch.Tensor:
    """Runs flash attention of causal windows, which count the query itself; (B, T, N, H)."""
    from torch.nn.attention.varlen import varlen_attn

    batch, length = query.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    output: Any = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        ends,
        ends,
        length,
        length,
        scale=scale,
        window_size=(window - 1, 0),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.unflatten(0, (batch, length))


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: flexible.BlockMask | None,
    soft_cap: float | None,
    scale: float | None,
) -> torch.Tensor:
    """Runs FlexAttention, compiled once for each cap; (B, T, N, H)."""
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    shared = query.shape[2] != key.shape[2]
    function = _compiled(flexible.flex_attention)
    return function(
        *heads_first, score_mod=_cap(soft_cap), block_mask=mask, scale=scale, enable_gqa=shared
    ).transpose(1, 2)


def block_mask(
    allowed: Callable[..., torch.Tensor], batch: int | None, lengths: tuple[int, int], device: Any
) -> flexible.BlockMask:
    """Makes a block mask; compiled, so that nothing of the size of query times key is made."""
    return _compiled(flexible.create_block_mask)(allowed, batch, None, *lengths, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@cache
def _cap(soft_cap: float | None) -> Callable[..., torch.Tensor] | None:
    """Returns what FlexAttention does to a score; one function for each cap."""
    if soft_cap is None:
        return None

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / soft_cap) * soft_cap

    return capped


class _Known(NamedTuple):
    """A block mask, and the tensors that it was made of as they were."""

    ids: tuple[ref[torch.Tensor] | None, ...]
    versions: tuple[int, ...]
    mask: flexible.BlockMask

    def are_of(self, ids: tuple[torch.Tensor | None, ...], versions: tuple[int, ...]) -> bool:
        """Returns whether these are the tensors, unchanged."""
        same = (
            x is None if held is None else held() is x
            for held, x in zip(self.ids, ids, strict=True)
        )
        return all(same) and versions == self.versions


# The last one of each kind: all blocks of a step get the same segments.
_last: dict[tuple[Any, ...], _Known] = {}


def mask_of(
    lengths: tuple[int, int],
    causal: bool,
    window: int | None,
    segments: torch.Tensor | None,
    blocks: torch.Tensor | None,
    device: torch.device,
) -> flexible.BlockMask | None:
    """Returns the block mask of a call, or None where all see all; the last ones are kept.

    Args:
        lengths: of query and key.
        causal: as in `ops.attention`, like the others.
        window: see there.
        segments: (B or 1, S), see there.
        blocks: (B or 1, S), see there.
        device: where the mask lies.
    """
    ids = (segments, blocks)
    if not causal and window is None and segments is None:
        return None
    kind = (lengths, causal, window, device)
    versions = tuple(-1 if x is None else internals_torch.version_of(x) for x in ids)
    known = _last.get(kind)
    if known is not None and known.are_of(ids, versions):
        return known.mask
    allowed = _allowed(lengths[1] - lengths[0], causal, window, segments, blocks)
    batch = max((x.shape[0] for x in ids if x is not None), default=1)
    made = block_mask(allowed, batch if batch > 1 else None, lengths, device)
    _last[kind] = _Known(tuple(None if x is None else ref(x) for x in ids), versions, made)
    return made


def _allowed(
    offset: int,
    causal: bool,
    window: int | None,
    segments: torch.Tensor | None,
    blocks: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    """Returns a function of (row, head, query, key) that says whether the query sees the key."""

    def number(ids: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return ids[row, place] if ids.shape[0] > 1 else ids[0, place]

    def allowed(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        place = query + offset
        behind = place - key
        seen = behind >= 0 if causal else behind == behind
        if blocks is not None:
            inside = number(blocks, row, key)
            seen = seen | ((number(blocks, row, place) == inside) & (inside >= 0))
        if window is not None:
            seen = seen & ((behind if causal else behind.abs()) < window)
        if segments is not None:
            seen = seen & (number(segments, row, place) == number(segments, row, key))
        return seen

    return allowed


def again(
    output: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """Returns the result of a kernel, with the second derivatives of the op's own body."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return output
    return _Again.apply(output, *inputs, options)


def _op_again(ctx: Context) -> Any:
    def function(
        _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        found: Any = attention.generic(query, key, value, **ctx.options)
        return found

    return (None, *ctx.saved_tensors), function


class _Again(torch.autograd.Function):
    """Lets gradients through to a kernel, or where a graph of them is asked for goes around it."""

    @staticmethod
    def forward(
        ctx: Context,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        return output.view_as(output)

    @staticmethod
    @backward(_op_again)
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None, None, None, None
