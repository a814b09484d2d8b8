"""Dropout for torch on CPU: random bits from NumPy's SFC64, 16 bits an element.

`torch.bernoulli` on CPU draws one Mersenne Twister double per element on one thread, and with a
generator first fills a float tensor with the rate; in a ViT's step in bfloat16 that was the largest
single cost. On a GPU torch's own kernel draws in registers, so there the generic path stays.
"""

from typing import Any

import keras
import numpy as np
import torch

from kmodels.dispatch import Tensor, override
from kmodels.ops.dropout import check_rate, dropout

LANE = 1 << 16


def _lanes(rate: float) -> int:
    """How many of the 65,536 values of a 16-bit draw mean 'dropped'."""
    return round(rate * LANE)


def supports(x: Tensor, rate: float, seed: keras.random.SeedGenerator | Tensor) -> str | None:
    """Seeded dropout on CPU with a rate that 16 bits can tell from 0 and 1."""
    if not isinstance(seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
        return "the tensor is not on a CPU"
    if not 0 < _lanes(rate) < LANE:
        return "the rate rounds to 0 or 1 in 16 bits"
    return None


@override(dropout, supports)
def dropout_torch(x: Tensor, rate: float, seed: keras.random.SeedGenerator | Tensor) -> Tensor:
    """Drops `round(rate * 65536)` of 65,536 draws; scales by exactly the share that stays."""
    check_rate(rate)
    bits = _bits if torch.compiler.is_compiling() else _draw
    return _Dropout.apply(x, bits(_next(seed), x.numel()), _lanes(rate))


def _next(seed: keras.random.SeedGenerator) -> torch.Tensor:
    """`seed.next()`, which torch.compile cannot trace because it goes through NumPy."""
    state = seed.state.value.clone()
    seed.state.assign(state + torch.tensor([0, 1], dtype=state.dtype))
    return state


def _draw(state: torch.Tensor, count: int) -> torch.Tensor:
    # The two words of a SeedGenerator's state, seed and call number, key a stream of their own.
    stream = np.random.SFC64([word & 0xFFFFFFFF for word in state.tolist()])
    words = stream.random_raw(-(-count // 4)).view(np.int16)
    return torch.from_numpy(words)[:count]


@torch.library.custom_op("kmodels::random_bits", mutates_args=())
def _bits(state: torch.Tensor, count: int) -> torch.Tensor:
    """The draw as one opaque node, because torch.compile can trace no generator."""
    return _draw(state, count).clone()


@_bits.register_fake
def _(state: torch.Tensor, count: int) -> torch.Tensor:
    return state.new_empty((count,), dtype=torch.int16)


class _Dropout(torch.autograd.Function):
    """Keeps one byte per element for the gradient, not a copy in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bits: torch.Tensor, dropped: int) -> torch.Tensor:
        keep = (bits >= dropped - LANE // 2).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = LANE / (LANE - dropped)
        return (x * ctx.scale).mul_(keep)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (keep,) = ctx.saved_tensors
        return (gradient * ctx.scale).mul_(keep), None, None
