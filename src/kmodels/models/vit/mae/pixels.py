"""Compute the pixels of patches, which MAE compares and shows."""

from typing import TYPE_CHECKING, Any

import keras

from kmodels.core.types import Tensor
from kmodels.models.vit.mae.masking import PatchMasking


class PatchPixels(keras.Model if TYPE_CHECKING else object):
    """A model that says the pixels of the patches of a ViT's images.

    Attributes:
        backbone: a `ViTBackbone`, whose config has the sizes.
        masking: hides patches.
        norm_pix_loss: whether pixels are normalised within each patch.
    """

    backbone: Any
    masking: PatchMasking
    norm_pix_loss: bool

    def hidden(self, noise: Tensor | None = None) -> Any:
        """Returns 1 for each hidden patch and 0 for those seen, float32 (B, P).

        Args:
            noise: (B, P), as of the call; without it the result is (1, P), for all images.
        """
        return self.masking.hidden(noise)

    def patchify(self, images: Tensor) -> Any:
        """(B, height, width, C) -> (B, P, patch * patch * C), patches row by row."""
        ops, (height, width) = keras.ops, self.backbone.config.grid
        side, channels = self.backbone.config.patch_size, images.shape[-1]
        x = ops.reshape(images, (-1, height, side, width, side, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, height * width, side * side * channels))

    def unpatchify(self, patches: Tensor) -> Any:
        """(B, P, patch * patch * C) -> (B, height, width, C)."""
        ops, (height, width) = keras.ops, self.backbone.config.grid
        side, channels = self.backbone.config.patch_size, self.backbone.config.image_shape[2]
        x = ops.reshape(patches, (-1, height, width, side, side, channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, height * side, width * side, channels))

    def targets(self, images: Tensor) -> Any:
        """Returns what the output is compared with, float32 (B, P, patch * patch * C)."""
        pixels = self.patchify(keras.ops.cast(images, "float32"))
        if not self.norm_pix_loss:
            return pixels
        mean, deviation = _statistics(pixels)
        return (pixels - mean) / deviation

    def reconstruct_images(self, images: Tensor, noise: Tensor | None = None) -> tuple[Any, Any]:
        """Shows what the model sees of images, and what it makes of that.

        Args:
            images: (B, height, width, C), preprocessed.
            noise: (B, P), decides what is hidden, see the class.

        Returns:
            The images with zeros for hidden patches, and the images with the model's pixels there;
            with `norm_pix_loss` these get mean and deviation of the patch that was hidden, which
            the model does not say.
        """
        ops = keras.ops
        images = ops.cast(images, "float32")
        pixels = self.patchify(images)
        found = self(images, noise=noise, training=False)
        if self.norm_pix_loss:
            mean, deviation = _statistics(pixels)
            found = found * deviation + mean
        hidden = ops.expand_dims(self.hidden(noise), -1)
        seen = pixels * (1 - hidden)
        return self.unpatchify(seen), self.unpatchify(seen + found * hidden)


def _statistics(pixels: Tensor) -> tuple[Any, Any]:
    """Returns mean and deviation of each patch, by the unbiased variance that torch computes."""
    ops = keras.ops
    mean = ops.mean(pixels, axis=-1, keepdims=True)
    number = max(pixels.shape[-1] - 1, 1)
    variance = ops.sum(ops.square(pixels - mean), axis=-1, keepdims=True) / number
    return mean, ops.sqrt(variance + 1e-6)
