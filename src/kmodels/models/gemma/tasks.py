"""Tasks of Gemma: text generation, and text embeddings with EmbeddingGemma."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from kmodels.models.blocks.causal_lm import CausalLM
from kmodels.models.blocks.embedder.preprocessor import (
    HubEmbedderPreprocessor,
    TextEmbedderPreprocessor,
)
from kmodels.models.blocks.embedder.task import HubEmbedder, TextEmbedder
from kmodels.models.blocks.hub_order import TextOrImages, by_name
from kmodels.models.gemma import gguf
from kmodels.models.gemma.model import Gemma3Backbone, Gemma4Backbone, GemmaBackbone
from kmodels.models.gemma.text import (
    Gemma3CausalLMPreprocessor,
    Gemma3Tokenizer,
    Gemma4CausalLMPreprocessor,
    GemmaCausalLMPreprocessor,
    GemmaTokenizer,
)

# === Text generation ===


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLM(CausalLM):
    """Gemma for text generation; arguments and methods are those of `CausalLM`."""

    backbone_class = GemmaBackbone
    preprocessor_class = GemmaCausalLMPreprocessor
    gguf_export = gguf.EXPORT


class HubCausalLM(TextOrImages, GemmaCausalLM):
    """A `GemmaCausalLM` with keras-hub's name, text-only or with images.

    The base of `Gemma3CausalLM` and `Gemma4CausalLM`. Positional arguments are preprocessor and
    backbone as in keras-hub, or backbone and preprocessor as in all other tasks. A backbone with a
    vision encoder creates the subclass with images.
    """

    order = ("preprocessor", "backbone")

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__(**by_name(type(self).__name__, self.names_of(args), args, kwargs))

    # Keras recognizes a plain functional model by its signature.
    __init__.__signature__ = inspect.signature(GemmaCausalLM.__init__)  # type: ignore[attr-defined]

    @classmethod
    def names_of(cls, args: tuple[Any, ...]) -> tuple[str, ...]:
        """See `TextOrImages.names_of`."""
        return cls.order[::-1] if args and isinstance(args[0], GemmaBackbone) else cls.order

    @classmethod
    def asks(cls, arguments: Mapping[str, Any]) -> bool:
        """Returns True if the backbone supports images."""
        return getattr(arguments.get("backbone"), "takes_images", False)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(HubCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`; see `HubCausalLM`."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3CausalLMPreprocessor
    image_family = "gemma_vision"


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4CausalLM(HubCausalLM):
    """`GemmaCausalLM` over a `Gemma4Backbone`; see `HubCausalLM`."""

    backbone_class = Gemma4Backbone
    preprocessor_class = Gemma4CausalLMPreprocessor
    image_family = "gemma4_vision"


# === Text embeddings ===


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTextEmbedderPreprocessor(TextEmbedderPreprocessor):
    """`TextEmbedderPreprocessor` of Gemma."""

    family = "gemma"
    tokenizer_class = GemmaTokenizer
    reader = "EmbeddingGemma"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTextEmbedder(TextEmbedder):
    """Gemma for text embeddings, one vector per text; see `TextEmbedder`.

    Source:
        EmbeddingGemma Team 2025 (arXiv:2509.20354).
    """

    backbone_class = GemmaBackbone
    preprocessor_class = GemmaTextEmbedderPreprocessor


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3TextEmbedderPreprocessor(HubEmbedderPreprocessor):
    """`HubEmbedderPreprocessor` of Gemma 3."""

    family = "gemma"
    tokenizer_class = Gemma3Tokenizer
    reader = "Gemma 3"
    siblings = ("GemmaTextEmbedderPreprocessor", *GemmaTextEmbedderPreprocessor.siblings)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3TextEmbedder(HubEmbedder):
    """Gemma 3 for text embeddings, one vector per text; see `HubEmbedder`."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3TextEmbedderPreprocessor
