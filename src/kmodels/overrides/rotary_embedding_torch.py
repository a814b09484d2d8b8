"""Rotary position embedding for torch: turned back on the way back, so that no input is kept."""

from typing import Any

import torch
from keras import ops

from kmodels.dispatch import Tensor, override
from kmodels.ops.rotary_embedding import (
    check_rotary_embedding,
    rotary_embedding,
    rotary_frequencies,
)


def supports(
    x: Tensor, positions: Tensor, *, max_wavelength: float = 10_000.0, scaling: float = 1.0
) -> str | None:
    """All but code under torch.compile, which fuses the op's own body."""
    return "the compiler fuses the op itself" if torch.compiler.is_compiling() else None


class _Rotation(torch.autograd.Function):
    """Autograd would keep halves of x, and cut and join gradients of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradients[0], cosine, -sine), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    wide = x.to(cosine.dtype)
    first, second = wide[..., :half], wide[..., half:]
    y = torch.empty_like(wide)
    torch.mul(first, cosine, out=y[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=y[..., half:]).addcmul_(first, sine)
    return y.to(x.dtype)


@override(rotary_embedding, supports)
def rotary_embedding_torch(
    x: Tensor, positions: Tensor, *, max_wavelength: float = 10_000.0, scaling: float = 1.0
) -> Tensor:
    """The op's own arithmetic, half of x at a time into one result."""
    check_rotary_embedding(x)
    x, positions = ops.convert_to_tensor(x), ops.convert_to_tensor(positions)
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = rotary_frequencies(x.shape[-1], max_wavelength, scaling)
    angles = positions.to(dtype)[..., None] * torch.from_numpy(frequencies).to(x.device, dtype)
    angles = angles[..., None, :]  # (T, 1, H/2) or (B, T, 1, H/2)
    return _Rotation.apply(x, angles.cos(), angles.sin())
