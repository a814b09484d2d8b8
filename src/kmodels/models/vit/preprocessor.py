"""Pictures to what a ViT takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kmodels.data.resizing import Resizing
from kmodels.errors import InputError


@dataclass(frozen=True)
class ViTImageClassifierPreprocessor:
    """Resizes, scales to [0, 1] and normalises pictures.

    Args:
        image_size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1].
        std: per channel, of pixels in [0, 1].
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos".
        antialias: smooths what is made smaller, as Pillow does; False with "nearest" and "bilinear"
            alone, for checkpoints that were trained so.
        crop_to_aspect_ratio: takes the largest middle part of the shape of `image_size`, instead of
            stretching the picture.

    Call:
        x: uint8 pictures (B, H, W, C), one picture (H, W, C), or a list of pictures of any size;
            floats are taken as values in [0, 255].
        y, sample_weight: handed through.

    Returns:
        float32 (B, height, width, C); with y or weights a tuple, as Keras' preprocessors do.

    Raises:
        InputError: for something that is not a picture or has another number of channels.
    """

    image_size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bilinear"
    antialias: bool = True
    crop_to_aspect_ratio: bool = False

    def __post_init__(self) -> None:
        for name in ("image_size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise InputError(
                f"image_size is {self.image_size}; give (height, width), each at least 1"
            )
        if len(self.mean) != len(self.std):
            raise InputError(
                f"mean has {len(self.mean)} values and std {len(self.std)}; give one per channel"
            )
        if not min(self.std) > 0:
            raise InputError(f"std is {self.std}; give numbers above 0")
        _ = self.resizing  # which checks its own

    @property
    def resizing(self) -> Resizing:
        """How it resizes, for `ImageLoader`."""
        return Resizing(self.interpolation, self.antialias, self.crop_to_aspect_ratio)

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Pictures to normalised floats."""
        pictures = self._resize(x)
        mean, std = np.asarray(self.mean, "float32"), np.asarray(self.std, "float32")
        pictures = (pictures / np.float32(255.0) - mean) / std
        if sample_weight is not None:
            return pictures, y, sample_weight
        return pictures if y is None else (pictures, y)

    def _resize(self, x: Any) -> np.ndarray:
        if not isinstance(x, list | tuple):
            x = np.asarray(x)
            x = x[None] if x.ndim == 3 else x
            if x.ndim == 4 and x.shape[1:3] == self.image_size:
                self._check(x.shape)
                return x.astype("float32")
        return np.stack([self._resize_one(np.asarray(picture)) for picture in x])

    def _resize_one(self, picture: np.ndarray) -> np.ndarray:
        self._check(picture.shape)
        resized = self.resizing(picture.astype("float32"), self.image_size)
        # The kernels with negative parts leave the range of pixels.
        return np.clip(resized, 0.0, 255.0)

    def _check(self, shape: Sequence[int]) -> None:
        if len(shape) not in (3, 4) or shape[-1] != len(self.mean):
            raise InputError(
                f"a picture has shape {tuple(shape)}; give (height, width, {len(self.mean)})"
            )

    def check_plain(self, package: str) -> None:
        """Raises `InputError` where another package's preprocessor cannot resize as this one."""
        if self.crop_to_aspect_ratio or not self.antialias:
            raise InputError(
                f"{package} has no counterpart for a preprocessor with crop_to_aspect_ratio="
                f"{self.crop_to_aspect_ratio} and antialias={self.antialias}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
