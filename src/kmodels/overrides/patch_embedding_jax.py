"""Patch embedding for JAX on CPU: a strided convolution reads patches where they lie."""

import jax
from jax import lax
from jax import numpy as jnp

from kmodels.dispatch import Tensor, override
from kmodels.ops.patch_embedding import check_patches, patch_embedding


def supports(
    images: Tensor, kernel: Tensor, bias: Tensor | None = None, *, patch_size: int
) -> str | None:
    """CPU only, the one device it was measured on."""
    return None if jax.default_backend() == "cpu" else "only measured to be faster on CPU"


@override(patch_embedding, supports)
def patch_embedding_jax(
    images: Tensor, kernel: Tensor, bias: Tensor | None = None, *, patch_size: int
) -> Tensor:
    """`lax.conv_general_dilated` with the kernel's first axis split into (p, p, C)."""
    images, kernel = jnp.asarray(images), jnp.asarray(kernel)
    height, width, channels = check_patches(images, kernel, patch_size)
    y = lax.conv_general_dilated(
        images,
        kernel.reshape(patch_size, patch_size, channels, -1),
        window_strides=(patch_size, patch_size),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = y.reshape(-1, height * width, kernel.shape[1])
    return y if bias is None else y + jnp.asarray(bias)
