"""Gemma 4 with images: what its backbone is called by, in keras-hub's words."""

from collections.abc import Mapping
from typing import Any

import keras

from kmodels.models.common.hub_order import in_order
from kmodels.models.common.image_text.patch_decoder import PatchTextBackbone
from kmodels.models.gemma.model import ORDER_4, Gemma4Backbone
from kmodels.models.gemma4_vision.config import Gemma4ImageTextConfig
from kmodels.models.vit.gemma4.patches import PatchFeatures
from kmodels.models.vit.weights import gemma4_peft


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4ImageTextBackbone(PatchTextBackbone, Gemma4Backbone):
    """A Gemma 4 that reads texts with images of any shape, without its output layer.

    Args:
        vision_encoder: a `Gemma4VisionEncoder` or, for the model without an encoder, a
            `Gemma4VisionEmbedder`, or the arguments of one; the model makes one from it, in the
            dtype of the text or that of the arguments.
        **fields: of `Gemma4ImageTextConfig`; the rest is as in `Gemma4Backbone`.

    Call:
        As of `PatchTextBackbone` -> hidden states (B, T, D).

    Raises:
        InputError: as of `PatchTextBackbone`.

    Source:
        Transformers' `Gemma4UnifiedForConditionalGeneration`, whose layers see what its
        `create_masks_for_generate` says; its plain `forward` has an older rule.
    """

    config_class = Gemma4ImageTextConfig
    family = "gemma4_vision"
    takes_images = True
    peft_names = staticmethod(gemma4_peft.names)

    @in_order(*ORDER_4)
    def __init__(self, *, vision_encoder: PatchFeatures | Mapping[str, Any], **fields: Any):
        super().__init__(vision_encoder=self.vision_settings(vision_encoder), **fields)

    @classmethod
    def make_vision_encoder(
        cls, config: Gemma4ImageTextConfig, policy: keras.DTypePolicy
    ) -> keras.layers.Layer:
        """Returns the layer that the config describes."""
        return config.encoder(name="vision_encoder", dtype=policy)
