"""Text generation with Gemma, and its training without logits."""

import keras

from kmodels.models.common.gguf.causal_lm import GGUFCausalLM
from kmodels.models.gemma.exports import gguf
from kmodels.models.gemma.model import Gemma3Backbone, GemmaBackbone
from kmodels.models.gemma.preprocessor import (
    Gemma3CausalLMPreprocessor,
    GemmaCausalLMPreprocessor,
)


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLM(GGUFCausalLM):
    """A Gemma that predicts the next token.

    Args:
        backbone: a `GemmaBackbone`.
        preprocessor: turns text into what the backbone takes, or None where the data comes as
            token ids.
        generation_config: the content of a checkpoint's generation_config.json, which is written
            again with the model. `compile(sampler="generation_config")` draws as it says.
        name: name of the model.
        compile: with the defaults of `compile` when training begins without that call; False has
            Keras say that it is missing.

    Call:
        what the backbone takes -> logits (B, T, V), float32, soft-capped in Gemma 2.
    """

    backbone_class = GemmaBackbone
    preprocessor_class = GemmaCausalLMPreprocessor
    gguf_export = gguf.EXPORT


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(GemmaCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`: keras-hub's name."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3CausalLMPreprocessor
