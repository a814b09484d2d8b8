"""Which kernel of torch serves a call of attention on CUDA, and why a better one does not.

Nothing here asks a device, so that tests and `kmodels doctor` can ask for one that is not there. No
choice was measured on a GPU yet: flash kernels are preferred since they hold nothing of the size
of query times key.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Kernel = Literal["sdpa", "varlen", "flex", "generic"]

# Pairs of query and key up to which SDPA with a dense mask serves, for FlexAttention compiles.
PAIRS = 2**18
# The widest heads of the flash kernels.
WIDEST = 256
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Facts:
    """What is known of a call before it runs; shapes and options as in `ops.attention`.

    Attributes:
        dtype: of query, key and value.
        lengths: of query and key.
        heads: of query and key.
        width: of a head.
        causal: as in the op.
        window: as in the op.
        hidden: which of "mask", "segments" and "blocks" are given.
        soft_cap: whether there is one.
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
    """A kernel, and one clause that says why a better one does not serve; None where none would."""

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
        # Their number would be one, which only a synchronisation with the host tells.
        return "varlen_attn wants the number of segments, which is known on the device alone"
    if facts.dtype not in HALF:
        return f"flash kernels take float16 and bfloat16, not {str(facts.dtype)[6:]}"
    if facts.width > WIDEST or facts.width % 8:
        return f"flash kernels take heads up to {WIDEST} wide in steps of 8, not {facts.width}"
    if not facts.causal or facts.lengths[0] != facts.lengths[1]:
        return "varlen_attn serves windows of causal attention to as many keys as queries"
    return None


def repeats_keys(facts: Facts) -> bool:
    """Returns whether keys are repeated for each query head: only flash kernels share them."""
    if facts.heads[0] == facts.heads[1]:
        return False
    flash = facts.dtype in HALF and facts.width <= WIDEST and facts.width % 8 == 0
    dense = bool(facts.hidden) or facts.window is not None
    return not flash or dense or (facts.causal and facts.lengths[0] != facts.lengths[1])
