"""A decoder that reads patches of images of any shape among the tokens of its texts."""

from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.decoder import PLACES, ImageTextBackbone
from kmodels.models.common.inputs import NAMES

PIXELS = ("pixel_values", "pixel_position_ids")


class PatchTextBackbone(ImageTextBackbone):
    """An `ImageTextBackbone` of patches with their places.

    The base of each family's own, whose config has `patch_width`, the numbers of a patch, and gives
    by `encoder()` a layer with `patches_per_feature`.

    Call:
        What `DecoderBackbone` takes, and "pixel_values" (B, M, P, C), floats from 0 to 1, with
        "pixel_position_ids" (B, M, P, 2) int, the column and the row of each patch, -1 for padding;
        "vision_mask" (B, T) int, 1 for each token that stands for a piece of an image, or
        "vision_indices" (B, N) int, the places of these tokens, 0 for none; keras-hub's names.
        Without either, the tokens `image_token_id` are those -> hidden states (B, T, D).

    Raises:
        InputError: as of `DecoderBackbone`, or for more such tokens than the images of a row have.
    """

    takes = (*NAMES, *PIXELS, *PLACES)
    absent = ("padding_mask", *PIXELS, "vision_mask")
    image_inputs = PIXELS

    @classmethod
    def image_symbols(cls, config: Any, dtype: str) -> dict[str, Any]:
        """See `ImageTextBackbone.image_symbols`."""
        shapes = {"pixel_values": config.patch_width, "pixel_position_ids": 2}
        dtypes = (dtype, "int32")
        return {
            name: keras.Input((None, None, width), name=name, dtype=kind, optional=True)
            for (name, width), kind in zip(shapes.items(), dtypes, strict=True)
        }

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for images without places, or more tokens than they have features."""
        given = [name for name in PIXELS if inputs.get(name) is not None]
        if len(given) == 1:
            raise InputError(f"the model got {given[0]} alone; give {' and '.join(PIXELS)}")
        wanted = self.config.patch_width
        if given and (width := inputs["pixel_values"].shape[-1]) != wanted:
            raise InputError(
                f"pixel_values have patches of {width} numbers, and the model takes {wanted}; give "
                "the image converter its patch_size, pooling_kernel_size and merge_patches"
            )
        mask, places = inputs.get("vision_mask"), inputs.get("pixel_position_ids")
        if not isinstance(mask, np.ndarray) or not isinstance(places, np.ndarray):
            return
        there = (places >= 0).all(-1).reshape(len(places), -1).sum(-1)
        have, need = there // self.config.encoder().patches_per_feature, mask.sum(axis=-1)
        if (short := np.flatnonzero(need > have)).size:
            row = int(short[0])
            raise InputError(
                f"row {row} has {int(need[row])} tokens for images, and its images have "
                f"{int(have[row])} pieces; give as many"
            )
