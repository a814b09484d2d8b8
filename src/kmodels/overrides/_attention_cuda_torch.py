"""Attention kernels of torch on CUDA: the choice of one for a call, and a function for each.

`choose` reads facts alone, so tests and `kmodels doctor` work without a GPU. No choice was measured
on a GPU yet; flash kernels are preferred because they hold no array of the size of queries times
keys. Tests replace the kernels by a recorder or a body for CPUs. Shapes are those of
`ops.attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch.nn.attention import flex_attention as flexible

from kmodels.core import internals_torch
from kmodels.core.dispatch import OpCall
from kmodels.ops.attention import hiding_window
from kmodels.overrides._tensors_torch import as_tensor

Kernel = Literal["sdpa", "varlen", "flex", "generic"]

# Pairs of query and key up to which SDPA with a dense mask serves, for FlexAttention compiles.
PAIRS = 2**18
# The widest heads of the flash kernels.
WIDEST = 256
HALF = (torch.float16, torch.bfloat16)
# From torch 2.12 on, `varlen_attn` takes fewer heads of keys than of queries.
SHARES_KEYS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


@dataclass(frozen=True)
class Facts:
    """The properties of a call that the choice depends on, as in `ops.attention`.

    Attributes:
        dtype: of query, key and value.
        lengths: of query and key.
        heads: of query and key.
        width: of a head.
        causal: as in the op.
        window: as in the op.
        hidden: those of "mask", "segments" and "blocks" that are given.
        soft_cap: whether scores are capped.
        drops: whether weights are dropped.
        compiled: whether torch.compile traces the call.
    """

    dtype: torch.dtype
    lengths: tuple[int, int]
    heads: tuple[int, int]
    width: int
    causal: bool = False
    window: int | None = None
    hidden: frozenset[str] = frozenset()
    soft_cap: bool = False
    drops: bool = False
    compiled: bool = False


class Choice(NamedTuple):
    """The chosen kernel and the reason a faster one was rejected, or None."""

    kernel: Kernel
    reason: str | None = None


def choose(facts: Facts) -> Choice:
    """Returns the kernel that serves a call on CUDA; "generic" is the op's own body."""
    length, keys = facts.lengths
    # torch aligns its own causal mask to the first key, the op to the last.
    aligned = not facts.causal or length == keys
    needs_flex = facts.soft_cap or "blocks" in facts.hidden
    if not (needs_flex or facts.hidden or facts.window is not None) and aligned:
        return Choice("sdpa")
    if "mask" in facts.hidden or facts.drops:
        what = "a dense mask" if "mask" in facts.hidden else "dropout"
        reason = f"only SDPA takes {what}, and its flash kernel no other mask beside it"
        return Choice("generic" if needs_flex else "sdpa", reason)
    reason = varlen_declines(facts)
    if reason is None:
        return Choice("varlen")
    if not needs_flex and length * keys <= PAIRS:
        return Choice("sdpa", f"{reason}; a short text takes a dense mask")
    if facts.compiled:
        return Choice("generic", "the compiler fuses the op's own body")
    if facts.window is not None and length > keys:
        return Choice("generic", "a query before the first key may see nothing")
    return Choice("flex", reason)


def varlen_declines(facts: Facts) -> str | None:
    """Returns why `varlen_attn` does not serve a call (a clause), or None."""
    if facts.soft_cap or "blocks" in facts.hidden:
        return "flash kernels take no soft caps and no image blocks"
    if "segments" in facts.hidden:
        # It takes their number, which needs a synchronization with the host.
        return "varlen_attn wants the number of segments, which is known on the device alone"
    if facts.dtype not in HALF:
        return f"flash kernels take float16 and bfloat16, not {str(facts.dtype)[6:]}"
    if facts.width > WIDEST or facts.width % 8:
        return f"flash kernels take heads up to {WIDEST} wide in steps of 8, not {facts.width}"
    if not facts.causal or facts.lengths[0] != facts.lengths[1]:
        return "varlen_attn serves windows of causal attention to as many keys as queries"
    return None


def repeats_keys(facts: Facts) -> bool:
    """Returns True if keys must be repeated for each query head: only flash kernels share them."""
    if facts.heads[0] == facts.heads[1]:
        return False
    flash = facts.dtype in HALF and facts.width <= WIDEST and facts.width % 8 == 0
    dense = bool(facts.hidden) or facts.window is not None
    return not flash or dense or (facts.causal and facts.lengths[0] != facts.lengths[1])


def facts(call: OpCall) -> Facts:
    """Returns the facts of a call."""
    query, key = as_tensor(call.query), as_tensor(call.key)
    hiding = {"mask": call.mask, "segments": call.segment_ids, "blocks": call.block_ids}
    return Facts(
        query.dtype,
        (query.shape[1], key.shape[1]),
        (query.shape[2], key.shape[2]),
        query.shape[3],
        causal=call.causal,
        window=hiding_window(call.window, query, key),
        hidden=frozenset(name for name, x in hiding.items() if x is not None),
        soft_cap=call.soft_cap is not None,
        drops=bool(call.dropout) and call.seed is not None,
        compiled=torch.compiler.is_compiling(),
    )


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scale: float | None
) -> torch.Tensor:
    """Runs flash attention of causal windows, which count the query itself; (B, T, N, H)."""
    from torch.nn.attention.varlen import varlen_attn

    batch, length = query.shape[:2]
    groups = query.shape[2] // key.shape[2]
    shares: dict[str, Any] = {}
    if groups > 1 and SHARES_KEYS:
        shares = {"enable_gqa": True}
    elif groups > 1:
        key, value = (x.repeat_interleave(groups, 2) for x in (key, value))
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
        **shares,
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
    """Makes a block mask; compiled, so that no array has the size of queries times keys."""
    return _compiled(flexible.create_block_mask)(allowed, batch, None, *lengths, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@cache
def _cap(soft_cap: float | None) -> Callable[..., torch.Tensor] | None:
    """Returns the score function of FlexAttention, one for each cap."""
    if soft_cap is None:
        return None

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / soft_cap) * soft_cap

    return capped


class _Known(NamedTuple):
    """A block mask, and references to the tensors it was made from with their versions."""

    ids: tuple[ref[torch.Tensor] | None, ...]
    versions: tuple[int, ...]
    mask: flexible.BlockMask

    def are_of(self, ids: tuple[torch.Tensor | None, ...], versions: tuple[int, ...]) -> bool:
        """Returns True if these are the tensors, unchanged."""
        same = (
            x is None if known is None else known() is x
            for known, x in zip(self.ids, ids, strict=True)
        )
        return all(same) and versions == self.versions


# The last one of each kind: all blocks of a step get the same segments.
_last: dict[tuple[Any, ...], _Known] = {}


def mask_of(call: OpCall) -> flexible.BlockMask | None:
    """Returns the block mask of a call, cached; None if every query sees every key."""
    ids, device = (call.segment_ids, call.block_ids), call.query.device
    if not call.causal and call.window is None and call.segment_ids is None:
        return None
    lengths = call.query.shape[1], call.key.shape[1]
    kind = (lengths, call.causal, call.window, device)
    versions = tuple(-1 if x is None else internals_torch.version_of(x) for x in ids)
    known = _last.get(kind)
    if known is not None and known.are_of(ids, versions):
        return known.mask
    allowed = _allowed(lengths[1] - lengths[0], call.causal, call.window, *ids)
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
    """Returns a function of (row, head, query, key) that is True if the query sees the key."""
    # Inside the function, torch would send the 0 to the device, and wait for it.
    segments, blocks = (
        x[0] if x is not None and x.shape[0] == 1 else x for x in (segments, blocks)
    )

    def number(ids: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return ids[row, place] if ids.ndim == 2 else ids[place]

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
