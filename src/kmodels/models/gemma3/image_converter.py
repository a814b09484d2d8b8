"""The image converter of Gemma 3."""

from collections.abc import Sequence
from typing import Any

import keras

from kmodels.models.common.image_text.pan_and_scan import PanAndScanConverter


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageConverter(PanAndScanConverter):
    """`PanAndScanConverter` with the size and the range of Gemma 3; keras-hub's name.

    Args:
        image_size: (height, width) in pixels.
        scale: as there, like all that is not listed; pixels go from -1 to 1.
        offset: as there.
        **kwargs: of `PanAndScanConverter`. Unlike keras-hub's defaults, images are smoothed and not
            cropped, as the checkpoints were trained.

    Call:
        As of `PanAndScanConverter`.
    """

    family = "gemma3"

    def __init__(
        self,
        image_size: Sequence[int] = (896, 896),
        scale: float | Sequence[float] | None = 1 / 127.5,
        offset: float | Sequence[float] | None = -1.0,
        **kwargs: Any,
    ):
        super().__init__(image_size, scale, offset, **kwargs)
