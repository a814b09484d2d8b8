"""Gemma 3 with a vision encoder: what its backbone is called by, in keras-hub's words."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.models.common.hub_order import in_order
from kmodels.models.common.image_text import peft
from kmodels.models.common.image_text.decoder import ImageTextBackbone
from kmodels.models.gemma.model import ORDER_3, Gemma3Backbone
from kmodels.models.gemma_vision.config import Gemma3ImageTextConfig
from kmodels.models.vit.gemma3_encoder import Gemma3VisionEncoder


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3ImageTextBackbone(ImageTextBackbone, Gemma3Backbone):
    """A Gemma 3 that reads texts with images, without its output layer.

    Args:
        vision_encoder: a `Gemma3VisionEncoder`, here or of keras-hub, or its arguments; the model
            makes one from it, in the dtype of the text or that of the arguments.
        image_size: side of the images, which the encoder says too, or None.
        **fields: of `Gemma3ImageTextConfig`; the rest is as in `Gemma3Backbone`.

    Call:
        {"token_ids", "padding_mask", "images", "vision_indices", "vision_mask"} -> hidden states
        (B, T, D), see `ImageTextBackbone`.

    Raises:
        InputError: for sizes that do not fit together, or names that the config lacks.

    Source:
        Gemma Team 2025, arXiv:2503.19786; Transformers' `Gemma3ForConditionalGeneration`.
    """

    config_class = Gemma3ImageTextConfig
    family = "gemma_vision"
    takes_images = True
    peft_names = staticmethod(peft.names)

    @in_order(*ORDER_3)
    def __init__(
        self,
        *,
        vision_encoder: Gemma3VisionEncoder | Mapping[str, Any],
        image_size: int | None = None,
        **fields: Any,
    ):
        super().__init__(vision_encoder=self.vision_settings(vision_encoder, image_size), **fields)

    @classmethod
    def make_vision_encoder(
        cls, config: Gemma3ImageTextConfig, policy: keras.DTypePolicy
    ) -> keras.layers.Layer:
        """Returns the encoder that the config describes."""
        return config.encoder(name="vision_encoder", dtype=policy)
