"""Rotary embedding of places in a plane for torch: as that of a row, from tables of its own."""

from functools import cache

import torch

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.rotary_embedding_2d import (
    check_rotary_embedding_2d,
    frequencies_2d,
    rotary_embedding_2d,
)
from kmodels.overrides import rotary_embedding_torch as row
from kmodels.overrides._tensors_torch import as_tensor


def supports(call: OpCall) -> str | None:
    """Serves pairs of two halves, where the embedding of a row is served too."""
    if call.pairs != "halves":
        return "only halves turn as those of a row do"
    return row.supports(call)


@override(rotary_embedding_2d, supports)
def rotary_embedding_2d_torch(
    x: torch.Tensor,
    coordinates: torch.Tensor,
    *,
    max_wavelength: float = 100.0,
    pairs: str = "halves",
) -> torch.Tensor:
    """Computes the op itself, by tables that queries, keys and all blocks share."""
    check_rotary_embedding_2d(x, coordinates, pairs)
    x, coordinates = as_tensor(x), as_tensor(coordinates)
    dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
    kind = (x.shape[-1], max_wavelength, x.device, dtype)

    def angles() -> torch.Tensor:
        found = coordinates.to(dtype)[..., None] * _frequencies(*kind)
        return found.flatten(-2)[..., None, :]

    return row.turn(x, *row.shared_tables(("2d", *kind), x, coordinates, angles))


@cache
def _frequencies(
    width: int, max_wavelength: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    return torch.tensor(frequencies_2d(width, max_wavelength), dtype=dtype, device=device)
