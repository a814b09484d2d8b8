"""Images of any shape as the square ones that a model takes, alone or with crops of them."""

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
from kmodels.models.common.image_text import transformers_files
from kmodels.models.common.image_text.image_converter import DIGITS, ImageConverter, each_channel

# What keras-hub's converter says of itself, as far as one here takes it.
HUB = (
    *("image_size", "scale", "offset", "crop_to_aspect_ratio", "pad_to_aspect_ratio"),
    *("interpolation", "antialias"),
)


class PanAndScanConverter(ImageConverter):
    """Resizes images as Pillow does, and adds crops of long ones where that is asked for.

    The base of each family's own. Pixels are those of transformers' `Gemma3ImageProcessorPil`: an
    image of bytes is rounded to bytes again when it is resized, before it is normalized.

    Args:
        image_size: (height, width) in pixels.
        scale: a number, or one per channel; None for 1.
        offset: a number, or one per channel; None for 0.
        crop_to_aspect_ratio: see `ImageConverter`.
        pad_to_aspect_ratio: must be False.
        interpolation: see `ImageConverter`.
        antialias: see `ImageConverter`.
        data_format: "channels_last" or None.
        do_pan_and_scan: adds crops to an image whose sides differ much; transformers' name, like
            the next three.
        pan_and_scan_min_crop_size: smallest side of a crop in pixels; an image whose crops would be
            smaller has none.
        pan_and_scan_max_num_crops: largest number of crops of an image.
        pan_and_scan_min_ratio_to_activate: smallest ratio of the longer side to the shorter one.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        images (B, H, W, 3), one image (H, W, 3), or a list of images of any size and form, see
        `open_picture` -> float32 (B, height, width, 3), or (height, width, 3) of one image, without
        crops.

    Raises:
        InputError: as `ImageConverter`, without `image_size`, or for a number that is too small.
    """

    def __init__(
        self,
        image_size: Sequence[int],
        scale: float | Sequence[float] | None = None,
        offset: float | Sequence[float] | None = None,
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        interpolation: str = "bilinear",
        antialias: bool = True,
        data_format: str | None = None,
        do_pan_and_scan: bool = False,
        pan_and_scan_min_crop_size: int = 256,
        pan_and_scan_max_num_crops: int = 4,
        pan_and_scan_min_ratio_to_activate: float = 1.2,
        **kwargs: Any,
    ):
        super().__init__(
            image_size,
            scale,
            offset,
            crop_to_aspect_ratio,
            pad_to_aspect_ratio,
            interpolation,
            antialias,
            data_format=data_format,
            **kwargs,
        )
        if self.image_size is None or len(self.image_size) != 2 or min(self.image_size) < 1:
            raise InputError(f"image_size is {image_size}; give (height, width), each at least 1")
        check_whole("pan_and_scan_min_crop_size", pan_and_scan_min_crop_size)
        check_whole("pan_and_scan_max_num_crops", pan_and_scan_max_num_crops)
        self.size = self.image_size
        self.do_pan_and_scan = do_pan_and_scan
        self.pan_and_scan_min_crop_size = pan_and_scan_min_crop_size
        self.pan_and_scan_max_num_crops = pan_and_scan_max_num_crops
        self.pan_and_scan_min_ratio_to_activate = pan_and_scan_min_ratio_to_activate
        scales = each_channel(1.0 if scale is None else scale, transformers_files.CHANNELS)
        offsets = each_channel(0.0 if offset is None else offset, transformers_files.CHANNELS)
        # In this form transformers rounds, and a model was trained on what it gave.
        self.std = [round(1 / (255 * x), DIGITS) for x in scales]
        self.mean = [round(-x * s, DIGITS) for x, s in zip(offsets, self.std, strict=True)]

    def call(self, x: Data, y: Data = None, sample_weight: Data = None) -> Any:
        """Returns converted images without crops; with labels or weights a tuple."""
        several = isinstance(x, list | tuple) or len(getattr(x, "shape", ())) == 4
        given: Any = x if several else [x]
        found = [self._resized(open_picture(one)) for one in given]
        done = self.scaled(np.stack(found) if several else found[0])
        return keras.utils.pack_x_y_sample_weight(done, y, sample_weight)

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Returns what a model sees of one image.

        Args:
            image: (H, W, 3), uint8, or float32 with values from 0 to 255.

        Returns:
            float32 (1 + crops, height, width, 3), the whole image first.
        """
        parts = [image, *(self.crops(image) if self.do_pan_and_scan else [])]
        return self.scaled(np.stack([self._resized(part) for part in parts]))

    def crops(self, image: np.ndarray) -> list[np.ndarray]:
        """Returns the crops of one image (H, W, C), none where it is too square or too small."""
        height, width = image.shape[:2]
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.pan_and_scan_min_ratio_to_activate:
            return []
        smallest = self.pan_and_scan_min_crop_size
        # Half is rounded up, as transformers does and Python's own round does not.
        count = max(2, min(longer // smallest, math.floor(longer / shorter + 0.5)))
        count = min(self.pan_and_scan_max_num_crops, count)
        side = math.ceil(longer / count)
        if min(side, shorter) < smallest:
            return []
        axis = 0 if height > width else 1
        starts = [start for start in range(0, side * count, side) if start < longer]
        return [image.take(range(s, min(s + side, longer)), axis) for s in starts]

    def scaled(self, found: np.ndarray) -> np.ndarray:
        """Returns images (..., 3) in [0, 255] times `scale` plus `offset`."""
        if found.dtype != np.uint8:
            return self._normalized(found)
        # There are 256 results, which are faster looked up than computed for each pixel.
        table = self._normalized(np.repeat(np.arange(256, dtype="uint8")[:, None], 3, 1))
        if (table == table[:, :1]).all():
            return table[:, 0][found]
        return np.stack([column[found[..., i]] for i, column in enumerate(table.T)], -1)

    def _normalized(self, found: np.ndarray) -> np.ndarray:
        share = (found.astype("float64") * (1 / 255)).astype("float32")
        return (share - np.asarray(self.mean, "float32")) / np.asarray(self.std, "float32")

    def _resized(self, image: np.ndarray) -> np.ndarray:
        found = self.resizing(image, self.size)
        # The kernels with negative parts leave the range of pixels.
        return found if found.dtype == np.uint8 else np.clip(found, 0.0, 255.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as plain values."""
        return {
            **super().to_dict(),
            "do_pan_and_scan": self.do_pan_and_scan,
            "pan_and_scan_min_crop_size": self.pan_and_scan_min_crop_size,
            "pan_and_scan_max_num_crops": self.pan_and_scan_max_num_crops,
            "pan_and_scan_min_ratio_to_activate": self.pan_and_scan_min_ratio_to_activate,
        }

    @classmethod
    def of_hub(cls, converter: keras.layers.Layer) -> Self:
        """Returns the converter with the settings of one of keras-hub."""
        held = converter.get_config()
        given = {n: held[n] for n in HUB if n != "image_size" or held[n] is not None}
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
        found = transformers_files.converter_settings(path, transformers_files.read, cls.__name__)
        if found is None:
            return super().from_preset(path, **settings)
        return cls(**{**found, **settings})
