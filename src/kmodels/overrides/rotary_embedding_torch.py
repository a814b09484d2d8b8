"""Rotary position embedding for torch: turned back on the way back, so that no input is kept."""

from functools import cache

import torch

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.rotary_embedding import (
    check_rotary_embedding,
    rotary_embedding,
    rotary_frequencies,
)
from kmodels.overrides._backward_torch import Context, backward, outside_graph
from kmodels.overrides._tensors_torch import as_tensor


def supports(call: OpCall) -> str | None:
    """Refuses code under torch.compile, which fuses the op's own body, and recorded graphs."""
    if torch.compiler.is_compiling():
        return "the compiler fuses the op itself"
    return outside_graph(call)


class _Rotation(torch.autograd.Function):
    """Autograd would keep halves of x, and cut and join gradients of its size."""

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
    half = x.shape[-1] // 2
    wide = x.to(cosine.dtype)
    first, second = wide[..., :half], wide[..., half:]
    y = torch.empty_like(wide)
    torch.mul(first, cosine, out=y[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=y[..., half:]).addcmul_(first, sine)
    return y.to(x.dtype)


@override(rotary_embedding, supports)
def rotary_embedding_torch(
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    max_wavelength: float = 10_000.0,
    scaling: float = 1.0,
) -> torch.Tensor:
    """Computes the op itself, half of x at a time into one result."""
    check_rotary_embedding(x)
    x, positions = as_tensor(x), as_tensor(positions)
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = _frequencies(x.shape[-1], max_wavelength, scaling, x.device, dtype)
    angles = positions.to(dtype)[..., None, None] * frequencies  # (T or B, T, 1, H/2)
    cosine, sine = angles.cos(), angles.sin()
    if not torch.is_grad_enabled():
        return _rotate(x, cosine, sine)
    return _Rotation.apply(x, cosine, sine)


@cache
def _frequencies(
    width: int, max_wavelength: float, scaling: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    found = rotary_frequencies(width, max_wavelength, scaling)
    return torch.from_numpy(found).to(device, dtype)
