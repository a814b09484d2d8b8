"""Patches of an image as tokens."""

from keras import ops

from kmodels.core.dispatch import op
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.ops.dense import dense


@op
def patch_embedding(
    images: Tensor, kernel: Tensor, bias: Tensor | None = None, *, patch_size: int
) -> Tensor:
    """Cuts images into square patches and maps each to a token.

    Shapes: images (B, h*p, w*p, C), kernel (p*p*C, D), bias (D,) -> (B, h*w, D), where
        p = patch_size. Patches are ordered row by row; inside a patch: row, column, channel.
    Dtypes: floating, all equal (the compute dtype), and the output's.

    Args:
        images: channels last.
        kernel: the weights; a convolution's (p, p, C, D) kernel, reshaped.
        bias: added to each token if given.
        patch_size: side of a patch in pixels.

    Raises:
        InputError: if height or width is not a multiple of the patch size, or the kernel does not
            fit.

    Parity: `keras.layers.Conv2D(D, p, strides=p)` on the reshaped kernel.
    Source: https://arxiv.org/abs/2010.11929, section 3.1
    """
    height, width, channels = check_patches(images, kernel, patch_size)
    y = ops.reshape(images, (-1, height, patch_size, width, patch_size, channels))
    y = ops.transpose(y, (0, 1, 3, 2, 4, 5))
    y = ops.reshape(y, (-1, height * width, patch_size * patch_size * channels))
    return dense(y, kernel, bias)


def check_patches(images: Tensor, kernel: Tensor, patch_size: int) -> tuple[int, int, int]:
    """Checks the arguments; returns patches per column, patches per row, and channels.

    Raises:
        InputError: if sizes do not fit, see `patch_embedding`.
    """
    _, height, width, channels = images.shape
    if height % patch_size or width % patch_size:
        raise InputError(
            f"patch_embedding got images of {height} x {width} pixels and patch_size {patch_size}; "
            f"height and width must be multiples of {patch_size}. Resize or crop the images."
        )
    if kernel.shape[0] != patch_size * patch_size * channels:
        raise InputError(
            f"patch_embedding got a kernel of shape {tuple(kernel.shape)}; with patch_size "
            f"{patch_size} and {channels} channels its first axis must be "
            f"{patch_size * patch_size * channels}."
        )
    return height // patch_size, width // patch_size, channels
