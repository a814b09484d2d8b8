"""Gemma 4 with images: what its backbone is called by, in keras-hub's words."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.common.image_text.decoder import PLACES, ImageTextBackbone
from kmodels.models.common.inputs import NAMES
from kmodels.models.gemma.layers import GemmaBlock
from kmodels.models.gemma4_vision.config import Gemma4ImageTextConfig
from kmodels.models.vit.gemma4.patches import PatchFeatures
from kmodels.models.vit.weights import gemma4_peft

PIXELS = ("pixel_values", "pixel_position_ids")


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextBackbone(ImageTextBackbone):
    """A Gemma 4 that reads texts with images of any shape, without its output layer.

    Args:
        vision_encoder: a `Gemma4VisionEncoder` or, for the model without an encoder, a
            `Gemma4VisionEmbedder`, or the arguments of one; the model makes one from it, in the
            dtype of the text or that of the arguments.
        **fields: of `Gemma4ImageTextConfig`.

    Call:
        What `DecoderBackbone` takes, and "pixel_values" (B, M, P, C), floats from 0 to 1, with
        "pixel_position_ids" (B, M, P, 2) int, the column and the row of each patch, -1 for padding;
        "vision_mask" (B, T) int, 1 for each token that stands for a piece of an image, or
        "vision_indices" (B, N) int, the places of these tokens, 0 for none; keras-hub's names.
        Without either, the tokens `image_token_id` are those -> hidden states (B, T, D).

    Raises:
        InputError: as of `DecoderBackbone`, or for more such tokens than the images of a row have.

    Source:
        Transformers' `Gemma4UnifiedForConditionalGeneration`, whose layers see what its
        `create_masks_for_generate` says; its plain `forward` has an older rule.
    """

    config_class = Gemma4ImageTextConfig
    block_class = GemmaBlock
    family = "gemma4_vision"
    takes = (*NAMES, *PIXELS, *PLACES)
    absent = ("padding_mask", *PIXELS, "vision_mask")
    pictures = PIXELS
    peft_names = staticmethod(gemma4_peft.names)

    def __init__(self, *, vision_encoder: PatchFeatures | Mapping[str, Any], **fields: Any):
        super().__init__(vision_encoder=self.vision_settings(vision_encoder), **fields)

    @classmethod
    def make_vision_encoder(
        cls, config: Gemma4ImageTextConfig, policy: keras.DTypePolicy
    ) -> keras.layers.Layer:
        """Returns the layer that the config describes."""
        return config.encoder(name="vision_encoder", dtype=policy)

    @classmethod
    def picture_inputs(cls, config: Gemma4ImageTextConfig, dtype: str) -> dict[str, Any]:
        """See `ImageTextBackbone.picture_inputs`."""
        shapes = {"pixel_values": config.patch_width, "pixel_position_ids": 2}
        dtypes = dict(zip(PIXELS, (dtype, "int32"), strict=True))
        return {
            name: keras.Input(
                (None, None, width), name=name, dtype=dtypes[name], optional=True
            )
            for name, width in shapes.items()
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
        have, need = self.config.encoder().features_of(there), mask.sum(axis=-1)
        if (short := np.flatnonzero(need > have)).size:
            row = int(short[0])
            raise InputError(
                f"row {row} has {int(need[row])} tokens for images, and its images have "
                f"{int(have[row])} pieces; give as many"
            )
