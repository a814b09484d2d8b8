"""Patch embedding for torch: a strided convolution reads patches where they lie."""

from keras import ops
from torch.nn import functional

from kmodels.dispatch import Tensor, override
from kmodels.ops.patch_embedding import check_patches, patch_embedding


@override(patch_embedding)
def patch_embedding_torch(
    images: Tensor, kernel: Tensor, bias: Tensor | None = None, *, patch_size: int
) -> Tensor:
    """`torch.nn.functional.conv2d` on views in torch's axis order."""
    images, kernel = ops.convert_to_tensor(images), ops.convert_to_tensor(kernel)
    _, _, channels = check_patches(images, kernel, patch_size)
    weight = kernel.view(patch_size, patch_size, channels, -1).permute(3, 2, 0, 1)
    bias = None if bias is None else ops.convert_to_tensor(bias)
    y = functional.conv2d(images.permute(0, 3, 1, 2), weight, bias, stride=patch_size)
    return y.flatten(2).transpose(1, 2)
