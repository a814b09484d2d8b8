"""Patch embedding for torch on CPU: a strided convolution, which copies no patches.

Small images are copied into rows of patches, which takes fewer calls than the convolution.
"""

import torch
from torch.nn import functional

from kmodels.core.dispatch import OpCall, override
from kmodels.ops.patch_embedding import check_patches, patch_embedding
from kmodels.overrides._tensors_torch import as_tensor

# Elements of all images below which the calls take longer than the copy.
SMALL = 2**14


def supports(call: OpCall) -> str | None:
    """Supports float32 on CPU, which was measured to be faster; a GPU may use TF32."""
    if not isinstance(call.images, torch.Tensor) or call.images.device.type != "cpu":
        return "only on CPU is the convolution known to be faster"
    if call.images.dtype != torch.float32:
        return "in half precision the matrix product is faster"
    return None


@override(patch_embedding, supports)
def patch_embedding_torch(
    images: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None = None, *, patch_size: int
) -> torch.Tensor:
    """`torch.nn.functional.conv2d` on views in torch's axis order; a product for small images."""
    images, kernel = as_tensor(images), as_tensor(kernel)
    height, width, channels = check_patches(images, kernel, patch_size)
    if images.numel() < SMALL:
        shape = (-1, height, patch_size, width, patch_size, channels)
        rows = images.reshape(shape).transpose(2, 3).reshape(-1, height * width, kernel.shape[0])
        return functional.linear(rows, kernel.T, None if bias is None else as_tensor(bias))
    weight = kernel.reshape(patch_size, patch_size, channels, -1).permute(3, 2, 0, 1)
    bias = None if bias is None else as_tensor(bias)
    y = functional.conv2d(images.permute(0, 3, 1, 2), weight, bias, stride=patch_size)
    return y.flatten(2).transpose(1, 2)
