"""Rotary position embedding for torch; the gradient is the inverse rotation, no input is kept."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch

from kmodels.core import internals_torch
from kmodels.core.dispatch import OpCall, of_mode, override
from kmodels.ops.rotary_embedding import (
    check_rotary_embedding,
    check_rotary_embedding_2d,
    frequencies_2d,
    rotary_embedding,
    rotary_embedding_2d,
    rotary_frequencies,
)
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import PLAIN, as_tensor

# Elements up to which calls of torch take longer than a copy that saves half of the calls.
SMALL = 2**16


@of_mode
def supports(call: OpCall) -> str | None:
    """Declines under torch.compile, which fuses the op's own body, and in recorded graphs."""
    if torch.compiler.is_compiling():
        return "the compiler fuses the op itself"
    return outside_graph(call)


class _Rotation(torch.autograd.Function):
    """Autograd would keep halves of x, and slice and join gradients of its size."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    @backward()
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _Rotation.apply(gradients[0], cosine, -sine), None, None


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    half, same = x.shape[-1] // 2, x.dtype is cosine.dtype
    wide = x if same else x.to(cosine.dtype)
    if x.numel() < SMALL:
        y = (wide * cosine).addcmul_(wide.roll(half, -1), sine)
        return y if same else y.to(x.dtype)
    first, second = wide[..., :half], wide[..., half:]
    cosine, sine = cosine[..., :half], sine[..., half:]
    y = torch.empty_like(wide)
    torch.mul(first, cosine, out=y[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=y[..., half:]).addcmul_(first, sine)
    return y.to(x.dtype)


@override(rotary_embedding, supports)
def rotary_embedding_torch(
    x: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    max_wavelength: float = 10_000.0,
    scaling: float | Sequence[float] = 1.0,
    turned: float = 1.0,
) -> torch.Tensor:
    """Rotates half of x at a time, into one result."""
    check_rotary_embedding(x)
    x, positions = as_tensor(x), None if positions is None else as_tensor(positions)
    return turn(x, *_tables(x, positions, max_wavelength, scaling, turned))


def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotates x (B, T, N, H) by the tables of `shared_tables`, which get no gradient."""
    if not torch.is_grad_enabled():
        return _rotate(x, cosine, sine)
    return _Rotation.apply(x, cosine, sine)


class _Tables(NamedTuple):
    """Cosines and sines, with their positions: a reference and version, or a length."""

    positions: ref[torch.Tensor] | int
    version: int
    cosine: torch.Tensor
    sine: torch.Tensor

    def are_of(self, positions: torch.Tensor | None, length: int) -> bool:
        if positions is None:
            return self.positions == length
        known = self.positions
        return (
            isinstance(known, ref)
            and known() is positions
            and self.version == internals_torch.version_of(positions)
        )


# The last tables of each kind: queries, keys and all blocks share them.
_last: dict[tuple[Any, ...], _Tables] = {}


def _tables(
    x: torch.Tensor,
    positions: torch.Tensor | None,
    max_wavelength: float,
    scaling: float | Sequence[float],
    turned: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines, and sines with their sign for each half, (T or B, T, 1, H) each."""
    dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
    divisors = scaling if isinstance(scaling, int | float) else tuple(scaling)
    kind = (x.shape[-1], max_wavelength, divisors, turned, x.device, dtype)

    def angles() -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        return places.to(dtype)[..., None, None] * _frequencies(*kind)

    return shared_tables(kind, x, positions, angles)


def shared_tables(
    kind: tuple[Any, ...],
    x: torch.Tensor,
    positions: torch.Tensor | None,
    angles: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines, and sines with their sign for each half, (T or B, T, 1, H) each.

    Args:
        kind: all that the tables depend on, except the positions.
        x: queries or keys.
        positions: the positions; the same tensor, unchanged, gets the cached tables.
        angles: computes the angles (T or B, T, 1, H / 2) if there are no cached tables.
    """
    length = x.shape[1]
    stay = _stay(x, positions)
    if stay and (known := _last.get(kind)) is not None and known.are_of(positions, length):
        return known.cosine, known.sine
    turns = angles()
    cosine, sine = turns.cos(), turns.sin()
    cosine, sine = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    if stay:
        key = length if positions is None else ref(positions)
        version = 0 if positions is None else internals_torch.version_of(positions)
        _last[kind] = _Tables(key, version, cosine, sine)
    return cosine, sine


def _stay(x: torch.Tensor, positions: torch.Tensor | None) -> bool:
    """Returns True if these tables may be cached: not those of a mode or a graph."""
    return not (
        torch.is_inference_mode_enabled()
        or type(x) not in PLAIN
        or (positions is not None and type(positions) not in PLAIN)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        or internals_torch.in_transform()
    )


@cache
def _frequencies(
    width: int,
    max_wavelength: float,
    scaling: float | Sequence[float],
    turned: float,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    frequencies = rotary_frequencies(width, max_wavelength, scaling, turned)
    return torch.from_numpy(frequencies).to(device, dtype)


def _supports_2d(call: OpCall) -> str | None:
    if call.pairs != "halves":
        return "only halves turn as those of a row do"
    return supports(call)


@override(rotary_embedding_2d, _supports_2d)
def rotary_embedding_2d_torch(
    x: torch.Tensor,
    coordinates: torch.Tensor,
    *,
    max_wavelength: float = 100.0,
    pairs: str = "halves",
) -> torch.Tensor:
    """Rotates by tables that queries, keys and all blocks share."""
    check_rotary_embedding_2d(x, coordinates, pairs)
    x, coordinates = as_tensor(x), as_tensor(coordinates)
    dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
    kind = (x.shape[-1], max_wavelength, x.device, dtype)

    def angles() -> torch.Tensor:
        turns = coordinates.to(dtype)[..., None] * _frequencies_2d(*kind)
        return turns.flatten(-2)[..., None, :]

    return turn(x, *shared_tables(("2d", *kind), x, coordinates, angles))


@cache
def _frequencies_2d(
    width: int, max_wavelength: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    return torch.tensor(frequencies_2d(width, max_wavelength), dtype=dtype, device=device)
