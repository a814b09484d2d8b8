"""Preprocessor of NaFlex models: images of any aspect ratio to patches."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.data.images.decoding import is_picture
from kmodels.data.images.naflex import grid_of, normalized, padded, patches_of
from kmodels.data.images.resizing import ResizingOfBytes
from kmodels.models.blocks.image_converter import picture
from kmodels.models.blocks.preprocessing import ImageClassifierPreprocessor
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.naflex.model import MASK, SHAPES, VALUES
from kmodels.models.vit.preprocessor import of_resizing

ARGUMENTS = ("patch_size", "max_num_patches", "mean", "std", "interpolation", "enlarge")


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexViTImageClassifierPreprocessor(ImageClassifierPreprocessor):
    """Resizes images, keeping their aspect ratio, and cuts them into patches.

    Args:
        patch_size: side of the square patches, in pixels.
        max_num_patches: patches of each row; an image is resized to fill them.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
        enlarge: enlarges small images too, as SigLIP 2 does; False keeps their size and pads the
            row.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        x: a list of images of any size, images (B, H, W, C), or one image (H, W, C), uint8 or
            floats in [0, 255]. Dictionaries that hold "pixel_values" go through untouched.
        y, sample_weight: returned unchanged.
        -> {"pixel_values": (B, max_num_patches, patch * patch * C) float32, "spatial_shapes":
        (B, 2) int32, "pixel_attention_mask": (B, max_num_patches) int32}, without the first axis
        for one image; with y or weights a tuple, as Keras' preprocessors give it.

    Raises:
        InputError: for something that is not an image or has another number of channels.

    Source:
        Transformers' `Siglip2ImageProcessorPil`, with which it agrees bit by bit.
    """

    family = "vit"
    interpolation = of_resizing("interpolation", "The kernel that resizes.")

    def __init__(
        self,
        patch_size: int = 16,
        max_num_patches: int = 256,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bilinear",
        enlarge: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.patch_size, self.max_num_patches = patch_size, max_num_patches
        grid_of(1, 1, patch_size, max_num_patches)
        self.mean, self.std = tuple(mean), tuple(std)
        if len(self.mean) != len(self.std) or not min(self.std) > 0:
            raise InputError(
                f"mean is {self.mean} and std {self.std}; give one number per channel, and of std "
                "numbers above 0"
            )
        self.enlarge = enlarge
        self.resizing = ResizingOfBytes(interpolation)

    def patches(self, image: Data) -> tuple[np.ndarray, tuple[int, int]]:
        """Returns the patches of an image (P, patch * patch * C), and its rows and columns."""
        x = picture(image, len(self.mean))
        side = self.patch_size
        grid = grid_of(x.shape[0], x.shape[1], side, self.max_num_patches, self.enlarge)
        if x.dtype != np.uint8:
            x = x.astype("float32")
        x = self.resizing(x, (grid[0] * side, grid[1] * side))
        return patches_of(normalized(x, self.mean, self.std), side), grid

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns patches, their mask and grids."""
        if not isinstance(x, dict):
            listed = isinstance(x, list | tuple)
            alone = is_picture(x) or (not listed and len(getattr(x, "shape", ())) == 3)
            images: Any = [x] if alone else x
            cut = [self.patches(image) for image in images]
            x = padded([one for one, _ in cut], [grid for _, grid in cut], self.max_num_patches)
            x = {name: value[0] for name, value in x.items()} if alone else x
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def compute_output_spec(
        self, x: keras.KerasTensor, y: Data = None, sample_weight: Data = None
    ) -> Any:
        """Returns shapes and dtypes that `call` gives."""
        batch, length = tuple(x.shape[:-3]), self.max_num_patches
        width = self.patch_size**2 * len(self.mean)
        spec = {
            VALUES: keras.KerasTensor((*batch, length, width), "float32"),
            MASK: keras.KerasTensor((*batch, length), "int32"),
            SHAPES: keras.KerasTensor((*batch, 2), "int32"),
        }
        return keras.utils.pack_x_y_sample_weight(spec, y, sample_weight)

    @classmethod
    def fitted(cls, arguments: dict[str, Any], config: ViTConfig) -> dict[str, Any]:
        """Returns a checkpoint's arguments, of a model of one size too; see `Preprocessor`."""
        settings = {"max_num_patches": config.num_positions, **arguments}
        settings["patch_size"] = config.patch_size
        return {name: value for name, value in settings.items() if name in ARGUMENTS}

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        settings = {name: getattr(self, name) for name in ARGUMENTS}
        return {**settings, "mean": list(self.mean), "std": list(self.std)}
