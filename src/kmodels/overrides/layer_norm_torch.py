"""Layer normalisation for torch: one fused kernel in place of eight elementwise ones."""

import torch

from kmodels.core.dispatch import override
from kmodels.ops.layer_norm import layer_norm
from kmodels.overrides._tensors_torch import as_tensor


@override(layer_norm)
def layer_norm_torch(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, *, epsilon: float = 1e-6
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm`, whose statistics are float32 for narrower inputs too."""
    x, scale = as_tensor(x), as_tensor(scale)
    bias = None if bias is None else as_tensor(bias)
    width = (x.shape[-1],)
    if scale.dtype is x.dtype and (bias is None or bias.dtype is x.dtype):
        return torch.layer_norm(x, width, scale, bias, epsilon)
    # The kernel takes one dtype; a wider scale must not be rounded, so all go up.
    dtype = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(dtype)
    return torch.layer_norm(x.to(dtype), width, scale.to(dtype), bias, epsilon).to(x.dtype)
