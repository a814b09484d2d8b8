"""CLIP's text tower: what its block and its backbone are called by, in keras-hub's words."""

import keras

from kmodels.models.clip.config import CLIPTextConfig
from kmodels.models.common.encoder.block import EncoderBlock
from kmodels.models.common.encoder.end_token import EndTokenEncoder
from kmodels.models.common.encoder.huggingface import peft_names


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextBlock(EncoderBlock):
    """`EncoderBlock` of a `CLIPTextConfig`."""

    config_class = CLIPTextConfig


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPTextEncoder(EndTokenEncoder):
    """CLIP's text tower without its projection; arguments and calls are `TextEncoderBackbone`'s.

    No token sees what stands behind it. `intermediate_activation` is "quick_gelu" by default, and
    `max_sequence_length` 77.

    Source:
        Radford et al., arXiv:2103.00020; Transformers' `modeling_clip`.
    """

    config_class = CLIPTextConfig
    block_class = CLIPTextBlock
    family = "clip"
    peft_names = staticmethod(peft_names)
