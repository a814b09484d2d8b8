"""Text generation with Qwen 3, and its training without logits."""

import keras

from kmodels.models.common.gguf.causal_lm import GGUFCausalLM
from kmodels.models.qwen3.exports import gguf
from kmodels.models.qwen3.model import Qwen3Backbone
from kmodels.models.qwen3.text import Qwen3CausalLMPreprocessor


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3CausalLM(GGUFCausalLM):
    """A Qwen 3 that predicts the next token; arguments and methods as of `CausalLM`."""

    backbone_class = Qwen3Backbone
    preprocessor_class = Qwen3CausalLMPreprocessor
    gguf_export = gguf.EXPORT
