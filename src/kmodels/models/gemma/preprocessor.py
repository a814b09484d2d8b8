"""Text to what a Gemma takes, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels.models.common.preprocessor import CausalLMPreprocessor
from kmodels.models.gemma.tokenizer import Gemma3Tokenizer, GemmaTokenizer
from kmodels.text import Tokenizer, Turns
from kmodels.text.templates import AUTO

# The chat formats of the instruction-tuned checkpoints. Gemma 4's prompt ends in an empty channel.
CHATS = {
    "gemma": Turns(
        user="<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
        model="<end_of_turn>",
        between="\n",
        tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    "gemma4": Turns(
        user="<|turn>user\n{content}<turn|>\n<|turn>model\n",
        model="<turn|>",
        between="\n",
        tokens=("<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        system="<|turn>system\n{content}<turn|>\n",
        prompt="<|channel>thought\n<channel|>",
        aside=r"<\|channel>.*?(<channel\|>|\Z)|<channel\|>",
    ),
}


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLMPreprocessor(CausalLMPreprocessor):
    """Turns texts into token ids, labels and weights; names and arguments as in keras-hub.

    Args:
        tokenizer: a `GemmaTokenizer` or another `kmodels.text.Tokenizer`, what its `to_dict`
            gives, or a path that `Tokenizer.from_file` reads.
        sequence_length: tokens of a row; may be set later.
        add_start_token: put <bos> in front.
        add_end_token: put <eos> behind; a chat's turns end with their own token instead.
        template: how records become text. "auto": messages by the tokenizer's own chat template, or
            by "gemma" or "gemma4" where it has none, whichever markers the vocabulary has, and all
            else as "instruction" does. "chat_template": all by the tokenizer's own. Else
            "instruction", "alpaca", "gemma", "gemma4" (the chat formats of the instruction-tuned
            models), or a text with {instruction}, {context} and {response}.
            Strings go through as they are, and so do {prompts, responses} except for chats.
        loss_on: "all" tokens, or "responses" alone.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        As of `CausalLMPreprocessor`.
    """

    family = "gemma"
    tokenizer_class = GemmaTokenizer
    chats = CHATS
    reader = "Gemma 3"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLMPreprocessor(GemmaCausalLMPreprocessor):
    """`GemmaCausalLMPreprocessor` with keras-hub's arguments and default for Gemma 3, text alone.

    Args:
        tokenizer: as there, like all that is not listed.
        image_converter: keras-hub's, or None; not used, as there are no images.
        sequence_length: as there.
        add_start_token: as there.
        add_end_token: as there.
        max_images_per_prompt: any number; there are no images.
        num_vision_tokens_per_image: any number, likewise.
        template: as there.
        loss_on: "responses" by default: prompts weigh 0.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        InputError: for images among the texts.
    """

    tokenizer_class = Gemma3Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: object = None,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        max_images_per_prompt: int = 2,
        num_vision_tokens_per_image: int = 256,
        template: str = AUTO,
        loss_on: str = "responses",
        **kwargs: Any,
    ):
        super().__init__(
            tokenizer, sequence_length, add_start_token, add_end_token, template, loss_on, **kwargs
        )
