"""Text generation with Gemma, and its training without logits."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from kmodels.models.common.gguf.causal_lm import GGUFCausalLM
from kmodels.models.common.hub_order import by_name
from kmodels.models.common.image_text.either import TextOrImages
from kmodels.models.gemma.exports import gguf
from kmodels.models.gemma.model import Gemma3Backbone, Gemma4Backbone, GemmaBackbone
from kmodels.models.gemma.preprocessor import (
    Gemma3CausalLMPreprocessor,
    Gemma4CausalLMPreprocessor,
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


class HubCausalLM(TextOrImages, GemmaCausalLM):
    """A `GemmaCausalLM` by keras-hub's name, of text alone or of texts with images.

    The base of `Gemma3CausalLM` and `Gemma4CausalLM`. Without names its arguments are preprocessor
    and backbone as in keras-hub, or backbone and preprocessor as in all other tasks. A backbone
    with a vision encoder makes the subclass with images.
    """

    order = ("preprocessor", "backbone")

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__(**by_name(type(self).__name__, self.names_of(args), args, kwargs))

    # Keras takes a model for a plain functional one by the arguments that it sees.
    __init__.__signature__ = inspect.signature(GemmaCausalLM.__init__)  # type: ignore[attr-defined]

    @classmethod
    def names_of(cls, args: tuple[Any, ...]) -> tuple[str, ...]:
        """See `TextOrImages.names_of`."""
        return cls.order[::-1] if args and isinstance(args[0], GemmaBackbone) else cls.order

    @classmethod
    def asks(cls, given: Mapping[str, Any]) -> bool:
        """Returns True if the backbone takes images."""
        return getattr(given.get("backbone"), "takes_images", False)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLM(HubCausalLM):
    """`GemmaCausalLM` over a `Gemma3Backbone`; see `HubCausalLM`."""

    backbone_class = Gemma3Backbone
    preprocessor_class = Gemma3CausalLMPreprocessor


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4CausalLM(HubCausalLM):
    """`GemmaCausalLM` over a `Gemma4Backbone`; see `HubCausalLM`."""

    backbone_class = Gemma4Backbone
    preprocessor_class = Gemma4CausalLMPreprocessor
