"""CLIP's text tower: what its block and its backbone are called by, in keras-hub's words."""

from typing import Any

import keras

from kmodels.core.types import Tensor
from kmodels.models.clip.config import CLIPTextConfig
from kmodels.models.clip.sharding import LAYOUT
from kmodels.models.clip.weights.huggingface import peft_names
from kmodels.models.common.encoder.block import EncoderBlock
from kmodels.models.common.encoder.text_encoder import TextEncoderBackbone
from kmodels.models.common.inputs import Reordered


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextBlock(EncoderBlock):
    """`EncoderBlock` of a `CLIPTextConfig`."""

    config_class = CLIPTextConfig


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextEncoder(TextEncoderBackbone):
    """CLIP's text tower without its projection; arguments and calls are `TextEncoderBackbone`'s.

    No token sees what stands behind it. `intermediate_activation` is "quick_gelu" by default, and
    `max_sequence_length` 77.

    Source:
        Radford et al., arXiv:2103.00020; Transformers' `modeling_clip`.
    """

    config_class = CLIPTextConfig
    block_class = CLIPTextBlock
    family = "clip"
    layout = LAYOUT
    peft_names = staticmethod(peft_names)

    def pool(self, hidden: Tensor, token_ids: Tensor) -> Any:
        """Returns the hidden states of the end tokens: (B, T, D), (B, T) -> (B, D)."""
        end = self.config.end_token_id
        if end is not None:
            token_ids = keras.ops.cast(keras.ops.equal(token_ids, end), "int32")
        # Of equal numbers the first counts, as padding may be the end token too.
        place = keras.ops.argmax(token_ids, axis=1)
        return Reordered()(hidden, keras.ops.expand_dims(place, 1))[:, 0]
