"""Text generation with Gemma."""

from typing import Any

import keras

from kmodels.models.gemma.model import Gemma3Backbone, GemmaBackbone, OptionalInputs
from kmodels.task import Task


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLM(OptionalInputs, Task):
    """A Gemma that predicts the next token.

    Args:
        backbone: a `GemmaBackbone`.
        preprocessor: turns text into what the backbone takes, or None where the data comes as
            token ids.

    Call:
        what the backbone takes -> logits (B, T, V), float32, soft-capped in Gemma 2.
    """

    backbone_class = GemmaBackbone

    def __init__(
        self,
        backbone: GemmaBackbone,
        preprocessor: Any = None,
        name: str = "gemma_causal_lm",
        **kwargs: Any,
    ):
        # === Graph ===
        inputs = backbone.input
        outputs = backbone.token_embedding(backbone(inputs), reverse=True)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=outputs,
            name=name,
            **kwargs,
        )

        # === Config ===
        self.head_dtype = backbone.dtype_policy
        self.settings = {}


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(GemmaCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`: keras-hub's name."""

    backbone_class = Gemma3Backbone
