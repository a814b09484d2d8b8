"""Texts as vectors with Qwen 3."""

import keras

from kmodels.models.common.embedder.preprocessor import HubEmbedderPreprocessor
from kmodels.models.common.embedder.task import HubEmbedder
from kmodels.models.qwen3.model import Qwen3Backbone
from kmodels.models.qwen3.text import Qwen3Tokenizer


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3TextEmbedderPreprocessor(HubEmbedderPreprocessor):
    """`HubEmbedderPreprocessor` of Qwen 3, whose texts have no start token."""

    family = "qwen3"
    tokenizer_class = Qwen3Tokenizer
    reader = "Qwen 3"
    siblings = ("Qwen3CausalLMPreprocessor",)


@keras.saving.register_keras_serializable(package="kmodels")
class Qwen3TextEmbedder(HubEmbedder):
    """A Qwen 3 that gives one vector for each text; all is as in `HubEmbedder`."""

    backbone_class = Qwen3Backbone
    preprocessor_class = Qwen3TextEmbedderPreprocessor
