"""Text to what a Gemma takes, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.models.common.hub_order import in_order
from kmodels.models.common.image_text.either import TextOrImages
from kmodels.models.common.preprocessor import CausalLMPreprocessor
from kmodels.models.gemma.tokenizer import Gemma3Tokenizer, Gemma4Tokenizer, GemmaTokenizer
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

# The positional arguments of keras-hub's preprocessors.
TEXT = ("sequence_length", "add_start_token", "add_end_token")
IMAGES = ("max_images_per_prompt", "num_vision_tokens_per_image")
SOUND = (
    *("max_audio_clips_per_prompt", "num_audio_tokens_per_clip", "audio_input_feat_size"),
    *("num_frames_per_video", "num_vision_tokens_per_frame", "video_fps"),
)
ORDER_3 = ("tokenizer", "image_converter", *TEXT, *IMAGES)
ORDER_4 = (
    *("tokenizer", "image_converter", "audio_converter", "video_converter"),
    *(*TEXT, *IMAGES, *SOUND),
)


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


class HubPreprocessor(TextOrImages, GemmaCausalLMPreprocessor):
    """A `GemmaCausalLMPreprocessor` by keras-hub's name, of text alone or of texts with images.

    The base of `Gemma3CausalLMPreprocessor` and `Gemma4CausalLMPreprocessor`.
    """

    @classmethod
    def asks(cls, given: Mapping[str, Any]) -> bool:
        """Returns True if there is an image converter."""
        return given.get("image_converter") is not None


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLMPreprocessor(HubPreprocessor):
    """`GemmaCausalLMPreprocessor` with keras-hub's arguments and default for Gemma 3.

    Args:
        tokenizer: as there, like all that is not listed.
        image_converter: a `Gemma3ImageConverter`, which makes a `Gemma3ImageTextLMPreprocessor`, or
            None for text alone.
        sequence_length: as there.
        add_start_token: as there.
        add_end_token: as there.
        max_images_per_prompt: of a preprocessor with images; text alone has none.
        num_vision_tokens_per_image: of a preprocessor with images.
        template: as there.
        loss_on: "responses" by default: prompts weigh 0.
        **kwargs: of `keras.layers.Layer`.

    Raises:
        InputError: for images among the texts without an image converter.
    """

    order = ORDER_3
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


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4CausalLMPreprocessor(HubPreprocessor):
    """`GemmaCausalLMPreprocessor` with keras-hub's arguments and default for Gemma 4.

    Args:
        tokenizer: as there, like all that is not listed.
        image_converter: a `Gemma4ImageConverter`, which makes a `Gemma4ImageTextLMPreprocessor`, or
            None for text alone.
        loss_on: "responses" by default: prompts weigh 0.
        **kwargs: of `GemmaCausalLMPreprocessor`, and keras-hub's: `audio_converter` and
            `video_converter` are None, and the numbers of images, clips and frames mean nothing
            where there are none.

    Raises:
        InputError: for an audio or video converter.
    """

    order = ORDER_4
    tokenizer_class = Gemma4Tokenizer

    @in_order(*ORDER_4)
    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: object = None,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        template: str = AUTO,
        loss_on: str = "responses",
        **kwargs: Any,
    ):
        super().__init__(
            tokenizer,
            *(sequence_length, add_start_token, add_end_token, template, loss_on),
            **without_sound(type(self).__name__, kwargs, IMAGES),
        )


def without_sound(
    owner: str, given: Mapping[str, Any], left: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns arguments without those of audio and video.

    Args:
        owner: name of the class, for the message.
        given: arguments of keras-hub's preprocessor of Gemma 4.
        left: other names that mean nothing here.

    Raises:
        InputError: for an audio or video converter.
    """
    for name in ("audio_converter", "video_converter"):
        if given.get(name) is not None:
            raise InputError(f"{owner} reads neither audio nor video; leave {name} out")
    dropped = {"audio_converter", "video_converter", *SOUND, *left}
    return {name: x for name, x in given.items() if name not in dropped}
