"""Dropout for torch: random bits from NumPy's SFC64 on a CPU, from torch's generator on a GPU.

`torch.bernoulli` on CPU draws one Mersenne Twister double per element on one thread, and with a
generator first fills a float tensor with the rate; in a ViT's step in bfloat16 that was the largest
single cost. On a GPU torch's kernel draws in registers, and its generator needs a seed on the host:
Keras reads it from the device, which waits in each draw; here the host keeps a copy. Compiled for a
GPU, bits are hashes of the element's index, without a generator.
"""

import keras
import numpy as np
import torch

from kmodels.core import seeds_torch
from kmodels.core.dispatch import OpCall, override
from kmodels.ops.attention import mixed
from kmodels.ops.dropout import check_rate, dropout
from kmodels.overrides._backward_torch import Context, backward

LANE = 1 << 16


def unsupported(
    x: torch.Tensor, rate: float, seed: keras.random.SeedGenerator | torch.Tensor
) -> str | None:
    """Returns why this dropout is not supported (a clause), or None."""
    if not isinstance(seed, keras.random.SeedGenerator):
        return "the seed is no SeedGenerator"
    if not isinstance(x, torch.Tensor) or not (x.device.type == "cpu" or on_cuda(x.device)):
        return "the tensor is neither on a CPU nor on CUDA"
    if not 0 < round(rate * LANE) < LANE:
        return "the rate rounds to 0 or 1 in 16 bits"
    return None


def supports(call: OpCall) -> str | None:
    """Supports seeded dropout with a rate that 16 bits distinguish from 0 and 1."""
    return unsupported(call.x, call.rate, call.seed)


@override(dropout, supports)
def dropout_torch(
    x: torch.Tensor, rate: float, seed: keras.random.SeedGenerator | torch.Tensor
) -> torch.Tensor:
    """Drops `round(rate * 65536)` of 65,536 draws; scales by exactly the share that stays."""
    check_rate(rate)
    kept, scale = keep(seed, x.numel(), rate)
    return _Dropout.apply(x, kept.view(x.shape), scale)


def keep(seed: keras.random.SeedGenerator, count: int, rate: float) -> tuple[torch.Tensor, float]:
    """Returns the dropout mask, (count,) uint8 of 0 and 1, and the factor of what stays.

    Bytes, not bools: torch's CPU kernels are six times as fast with them. The state of the seed
    advances.
    """
    dropped, device = round(rate * LANE), seed.state.value.device
    share, is_compiled = LANE / (LANE - dropped), torch.compiler.is_compiling()
    if on_cuda(device) and not is_compiled:
        generator = torch.Generator(device)
        generator.manual_seed(seeds_torch.mixed(*seeds_torch.take(seed)))
        drawn = torch.empty(count, dtype=torch.uint8, device=device)
        return drawn.bernoulli_(1 / share, generator=generator), share
    # As `seed.next()`, which torch.compile cannot trace because it uses NumPy.
    state = seed.state.value.clone()
    following = state.clone()
    following[1:].add_(1)
    seed.state.assign(following)
    state = seeds_torch.apart(state)
    if on_cuda(device):
        return _hashed(_copied(state), count, dropped), share
    return (_kept if is_compiled else _draw)(state, count, dropped), share


def on_cuda(device: torch.device) -> bool:
    """Returns True for CUDA: torch's generator draws, and the host must not read the memory."""
    return device.type == "cuda"


def _hashed(state: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """Returns the mask by arithmetic that a compiler fuses with its use."""
    place = torch.arange(count, dtype=torch.int32, device=state.device)
    words = mixed(mixed(mixed(place) ^ state[0]) + state[1])
    return ((words & (LANE - 1)) >= dropped).to(torch.uint8)


def _draw(state: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    # Seed and call number of the generator's state key a separate stream.
    stream = np.random.SFC64([word & 0xFFFFFFFF for word in state.tolist()])
    words = stream.random_raw(-(-count // 4)).view(np.int16)[:count]
    # NumPy compares 16-bit numbers six times as fast as torch.
    return torch.from_numpy((words >= np.int16(dropped - LANE // 2)).view(np.uint8))


@torch.library.custom_op("kmodels::kept", mutates_args=())
def _kept(state: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    """Returns the mask as one opaque node, because torch.compile cannot trace a generator."""
    return _draw(state, count, dropped)


@_kept.register_fake
def _(state: torch.Tensor, count: int, dropped: int) -> torch.Tensor:
    return state.new_empty((count,), dtype=torch.uint8)


@torch.library.custom_op("kmodels::copied", mutates_args=())
def _copied(state: torch.Tensor) -> torch.Tensor:
    """Returns the state of a draw as a node that a compiler keeps.

    Otherwise the backward pass would recompute the bits from the variable, which has advanced.
    """
    return state.clone()


@_copied.register_fake
def _(state: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(state)


class _Dropout(torch.autograd.Function):
    """Keeps one byte per element for the gradient, not a copy in the input's dtype."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return scaled(x, kept, scale)

    @staticmethod
    @backward()
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _Dropout.apply(gradients[0], kept, ctx.scale), None, None


def scaled(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the product of all three in one pass, rounded once; without autograd."""
    return torch.addcmul(x.new_zeros(()), x, kept, value=scale)
