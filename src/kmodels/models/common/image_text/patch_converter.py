"""Images of any shape as patches with their places, as many as a model takes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.models.common.image_text import patch_files, transformers_files
from kmodels.models.common.image_text.image_converter import ImageConverter

CHANNELS = 3
# What keras-hub's converter says of itself; it leaves out the last two, whose defaults count then.
HUB = ("patch_size", "max_soft_tokens", "pooling_kernel_size")


class PatchConverter(ImageConverter):
    """Resizes images in their own shape, and cuts them into patches; keras-hub's arguments.

    The base of each family's own. The sides of an image become multiples of `patch_size *
    pooling_kernel_size`, as large as `max_soft_tokens` pieces of this side allow. Pixels are those
    of transformers' `Gemma4ImageProcessorPil`: an image of bytes is rounded to bytes again when it
    is resized, and its numbers go from 0 to 1.

    Args:
        patch_size: side of the square patches, in pixels.
        max_soft_tokens: largest number of pieces of an image, each of which becomes a token.
        pooling_kernel_size: patches along each side of a piece.
        merge_patches: gives pieces as one patch each.
        interpolation: see `ImageConverter`.
        image_size: not used, as in keras-hub: the size follows from the image.
        scale: 1 / 255 or None.
        offset: 0 or None.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        images (B, H, W, 3), one image (H, W, 3), or a list of images of any size and form, see
        `open_picture` -> {"pixel_values": float32 (B, P, side * side * 3), "pixel_position_ids":
        int32 (B, P, 2)}, column and row of each patch, with zeros and -1 behind the last; without
        the first axis for one image.

    Raises:
        InputError: for numbers that are too small.
    """

    do_pan_and_scan = False

    def __init__(
        self,
        patch_size: int = 16,
        max_soft_tokens: int = 280,
        pooling_kernel_size: int = 3,
        merge_patches: bool = False,
        interpolation: str = "bicubic",
        *,
        image_size: object = None,
        scale: float | Sequence[float] | None = None,
        offset: float | Sequence[float] | None = None,
        **kwargs: Any,
    ):
        if not np.allclose((1 / 255 if scale is None else scale), 1 / 255) or np.any(offset or 0):
            raise InputError(
                f"scale is {scale} and offset {offset}; pixels go from 0 to 1: leave both out"
            )
        super().__init__(
            None, 1 / 255, None, False, interpolation=interpolation, antialias=True, **kwargs
        )
        check_whole("patch_size", patch_size)
        check_whole("max_soft_tokens", max_soft_tokens)
        check_whole("pooling_kernel_size", pooling_kernel_size)
        self.patch_size = patch_size
        self.max_soft_tokens = max_soft_tokens
        self.pooling_kernel_size = pooling_kernel_size
        self.merge_patches = merge_patches
        self.piece = patch_size * pooling_kernel_size
        self.side = self.piece if merge_patches else patch_size
        self.max_patches = max_soft_tokens * (self.piece // self.side) ** 2

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size in which an image is cut, (height, width) in pixels."""
        piece, most = self.piece, self.max_soft_tokens
        factor = math.sqrt(most * piece**2 / (height * width))
        rows, columns = (math.floor(factor * side / piece) for side in (height, width))
        if not rows:
            rows, columns = 1, min(max(width // height, 1), most)
        elif not columns:
            rows, columns = min(max(height // width, 1), most), 1
        return rows * piece, columns * piece

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Returns what a model sees of one image, before it is cut.

        Args:
            image: (H, W, 3), uint8, or float32 with values from 0 to 255.

        Returns:
            float32 (1, height, width, 3), from 0 to 1.
        """
        found = self.resizing(image, self.size_of(*image.shape[:2]))
        # The kernels with negative parts leave the range of pixels.
        found = found if found.dtype == np.uint8 else np.clip(found, 0.0, 255.0)
        return (found.astype("float64") * (1 / 255)).astype("float32")[None]

    def pieces(self, pixels: np.ndarray) -> int:
        """Returns the tokens of what `pixels` gave."""
        return pixels.shape[-3] * pixels.shape[-2] // self.piece**2

    def cut(self, image: np.ndarray, pixels: np.ndarray, places: np.ndarray) -> None:
        """Writes the patches of an image and their places.

        Args:
            image: (height, width, 3), what `pixels` gave of it.
            pixels: (P, C), zeros.
            places: (P, 2), filled with -1.
        """
        side = self.side
        rows, columns = image.shape[0] // side, image.shape[1] // side
        patches = image.reshape(rows, side, columns, side, CHANNELS).transpose(0, 2, 1, 3, 4)
        pixels[: rows * columns] = patches.reshape(rows * columns, -1)
        numbers = np.arange(rows * columns)
        places[: rows * columns] = np.stack([numbers % columns, numbers // columns], -1)

    def empty(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns patches and places of no images: (*shape, P, C) float32, (*shape, P, 2) int32."""
        whole = (*shape, self.max_patches)
        pixels = np.zeros((*whole, self.side**2 * CHANNELS), "float32")
        return pixels, np.full((*whole, 2), -1, "int32")

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns patches and places of images; with labels or weights a tuple."""
        several = isinstance(x, list | tuple) or len(getattr(x, "shape", ())) == 4
        given: Any = x if several else [x]
        pixels, places = self.empty(len(given))
        for number, one in enumerate(given):
            self.cut(self.pixels(open_picture(one))[0], pixels[number], places[number])
        found = {"pixel_values": pixels, "pixel_position_ids": places}
        if not several:
            found = {name: array[0] for name, array in found.items()}
        return keras.utils.pack_x_y_sample_weight(found, y, sample_weight)

    def compute_output_spec(
        self, x: keras.KerasTensor, y: Data = None, sample_weight: Data = None
    ) -> Any:
        """Returns shapes and dtypes that `call` gives."""
        found = {
            name: keras.KerasTensor((*x.shape[:-3], *array.shape), array.dtype.name)
            for name, array in zip(
                ("pixel_values", "pixel_position_ids"), self.empty(), strict=True
            )
        }
        return keras.utils.pack_x_y_sample_weight(found, y, sample_weight)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {
            "patch_size": self.patch_size,
            "max_soft_tokens": self.max_soft_tokens,
            "pooling_kernel_size": self.pooling_kernel_size,
            "merge_patches": self.merge_patches,
            "interpolation": self.interpolation,
        }

    @classmethod
    def of_hub(cls, converter: keras.layers.Layer) -> Self:
        """Returns the converter with the settings of one of keras-hub."""
        given = {name: getattr(converter, name) for name in HUB}
        return cls(**given)

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the image converter of a checkpoint.

        Args:
            preset: a directory that `save_to_preset` of a model, a preprocessor or a converter
                wrote, or one of transformers with preprocessor_config.json or
                processor_config.json.
            **settings: arguments to change.

        Raises:
            InputError: for a directory without these, or a setting that is not here.
        """
        path = presets.locate(preset)
        found = transformers_files.converter_settings(path, patch_files.read, cls.__name__)
        if found is None:
            return super().from_preset(path, **settings)
        return cls(**{**found, **settings})
