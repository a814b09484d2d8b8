"""Text generation with Gemma, and its training without logits."""

from pathlib import Path

import keras

from kmodels import presets
from kmodels.models.common.causal_lm import CausalLM
from kmodels.models.gemma.exports import gguf
from kmodels.models.gemma.model import Gemma3Backbone, GemmaBackbone
from kmodels.models.gemma.preprocessor import (
    Gemma3CausalLMPreprocessor,
    GemmaCausalLMPreprocessor,
)


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLM(CausalLM):
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

    def export_to_gguf(
        self, path: str | Path, dtype: str = "float16", text_only: bool = False
    ) -> Path:
        """Writes a GGUF file that llama.cpp runs, atomically, with the tokenizer if there is one.

        Args:
            path: ends in .gguf.
            dtype: how kernels and embeddings are stored: "float32", "bfloat16", "float16", or
                "q8_0" for 8 bits with a scale for every 32.
            text_only: writes the text part of a checkpoint whose other parts were left out.

        Raises:
            InputError: for a model with adapters, one that llama.cpp's Gemma cannot express, or
                without the gguf package.
        """
        presets.check_parts(self, text_only, "a GGUF file")
        return gguf.export_to_gguf(self, path, dtype)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(GemmaCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`: keras-hub's name."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3CausalLMPreprocessor
