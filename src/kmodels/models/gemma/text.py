"""Tokenizers and preprocessors of Gemma, with keras-hub's names and arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tokenizers

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike
from kmodels.models.blocks.hub_order import TextOrImages, in_order
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.blocks.tokenizer import LayerTokenizer
from kmodels.text import Tokenizer, Turns, sentencepiece
from kmodels.text.pieces import ENDS_OF_TURNS, TURNS
from kmodels.text.templates import AUTO

# === Tokenizers ===

# For each argument its tokens, and the name of the attribute of each token.
Named = Mapping[str, Mapping[str, str]]
NAMED_3: Named = {
    "has_vision_tokens": {
        "<img>": "image_placeholder",
        "<start_of_image>": "start_of_image_token",
        "<end_of_image>": "end_of_image_token",
    }
}
NAMED_4: Named = {
    f"has_{kind}_tokens": {
        f"<|{word}|>": f"{word}_placeholder",
        f"<|{word}>": f"start_of_{word}_token",
        f"<{word}|>": f"end_of_{word}_token",
    }
    for kind, word in (("vision", "image"), ("audio", "audio"), ("video", "video"))
}


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTokenizer(LayerTokenizer):
    """A `kmodels.text.Tokenizer` that is a Keras layer, as keras-hub's class of this name.

    Args:
        proto: path of a SentencePiece model, its content as bytes or in base64, or a
            `tokenizers.Tokenizer`.
        sequence_length: length to which rows are truncated or padded, or None.
        dtype: dtype of the tokens: "int32", "int64", or "string" for their texts.
        add_bos: adds the start token.
        add_eos: adds the end token, which truncation may remove.
        start: text of the start token; by default that of the file, else <bos>.
        end: text of the end token; by default that of the file, else <eos>.
        pad: text of the padding token; by default that of the file, else <pad>.
        stop: see `Tokenizer`.
        settings: see `Tokenizer`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call:
        A text, a list or an array of texts, or a tensor of strings, also inside
        `tf.data.Dataset.map` -> a list of ids or a list of such lists; inside tf.data a tensor,
        ragged for a batch.

    Raises:
        InputError: for a file that is not a SentencePiece model or has no <bos>, <eos> or <pad>, or
            for another dtype.
    """

    unknown_token = "<unk>"
    roles = {"start": "<bos>", "end": "<eos>", "pad": "<pad>"}  # noqa: RUF012
    ends = ("<eos>", *ENDS_OF_TURNS.values())

    def __init__(
        self,
        proto: str | Path | bytes,
        sequence_length: int | None = None,
        dtype: DTypeLike = "int32",
        add_bos: bool = False,
        add_eos: bool = False,
        *,
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
        stop: Sequence[int] = (),
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        content: bytes | None = None
        if isinstance(proto, tokenizers.Tokenizer):
            core = proto
        else:
            content, origin = sentencepiece.content_of(proto)
            core, named = sentencepiece.parse(content, origin, TURNS)
            start = start or named.get("start")
            end = end or named.get("end")
            pad = pad or named.get("pad")
        super().__init__(
            core,
            sequence_length,
            dtype,
            add_bos,
            add_eos,
            start=start,
            end=end,
            pad=pad,
            stop=stop,
            settings=settings,
            **kwargs,
        )
        self._proto = content
        if content is None:
            return
        absent = {
            "<bos>": self.start_token is None,
            "<pad>": pad is None and self.pad_token == self.end_token,
        }
        if names := [name for name, missing in absent.items() if missing]:
            raise InputError(
                f"the vocabulary has no {' and no '.join(names)}, which Gemma needs; give another "
                "file, or the names of the tokens as start= and pad="
            )

    @property
    def proto(self) -> bytes:
        """The content of a SentencePiece model with the same ids.

        Raises:
            InputError: for a tokenizer that a SentencePiece model cannot represent.
        """
        return self.to_sentencepiece() if self._proto is None else self._proto


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Tokenizer(GemmaTokenizer):
    """`GemmaTokenizer` with keras-hub's names for the tokens of images.

    Args:
        proto: see `GemmaTokenizer`.
        has_vision_tokens: True requires <img>, <start_of_image> and <end_of_image> in the
            vocabulary, False ignores them, and None accepts both.
        **kwargs: other arguments of `GemmaTokenizer`.

    Attributes:
        image_placeholder_id: id of <img>, -1 if it is absent or ignored.
        start_of_image_token_id: id of <start_of_image>, or -1.
        end_of_image_token_id: id of <end_of_image>, or -1.

    Raises:
        InputError: for required tokens that are not in the vocabulary.
    """

    def __init__(
        self, proto: str | Path | bytes, has_vision_tokens: bool | None = None, **kwargs: Any
    ):
        super().__init__(proto, **kwargs)
        self.has_vision_tokens = has_vision_tokens
        _name_tokens(self, NAMED_3)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "has_vision_tokens": self.has_vision_tokens}


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4Tokenizer(GemmaTokenizer):
    """`GemmaTokenizer` with keras-hub's names for the tokens of images, audio and video.

    Args:
        proto: see `GemmaTokenizer`.
        has_vision_tokens: True requires <|image|>, <|image> and <image|> in the vocabulary, False
            ignores them, and None accepts both.
        has_audio_tokens: the same for <|audio|>, <|audio> and <audio|>.
        has_video_tokens: the same for <|video|>, <|video> and <video|>.
        **kwargs: other arguments of `GemmaTokenizer`.

    Attributes:
        image_placeholder_id: id of <|image|>, -1 if it is absent or ignored; each of the other
            tokens has such an attribute, for example `start_of_image_token_id`.

    Raises:
        InputError: for required tokens that are not in the vocabulary.
    """

    @in_order("proto", "has_vision_tokens", "has_audio_tokens", "has_video_tokens")
    def __init__(
        self,
        proto: str | Path | bytes,
        has_vision_tokens: bool | None = None,
        has_audio_tokens: bool | None = None,
        has_video_tokens: bool | None = None,
        **kwargs: Any,
    ):
        super().__init__(proto, **kwargs)
        self.has_vision_tokens = has_vision_tokens
        self.has_audio_tokens = has_audio_tokens
        self.has_video_tokens = has_video_tokens
        _name_tokens(self, NAMED_4)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), **{name: getattr(self, name) for name in NAMED_4}}


def _name_tokens(tokenizer: GemmaTokenizer, named: Named) -> None:
    """Sets the attributes of tokens and of their ids."""
    for argument, tokens in named.items():
        wanted = getattr(tokenizer, argument)
        ids = {text: tokenizer.core.token_to_id(text) for text in tokens}
        if wanted and (absent := [text for text, i in ids.items() if i is None]):
            raise InputError(
                f"the vocabulary has no {', '.join(absent)}; give {argument}=False for a model "
                "without them"
            )
        for text, name in tokens.items():
            number = None if wanted is False else ids[text]
            setattr(tokenizer, name, text)
            setattr(tokenizer, f"{name}_id", -1 if number is None else number)


# === Preprocessors ===

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
PROMPT_ORDER_3 = ("tokenizer", "image_converter", *TEXT, *IMAGES)
PROMPT_ORDER_4 = (
    *("tokenizer", "image_converter", "audio_converter", "video_converter"),
    *(*TEXT, *IMAGES, *SOUND),
)


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaCausalLMPreprocessor(CausalLMPreprocessor):
    """Turns texts into token ids, labels and weights; names and arguments as in keras-hub.

    Args:
        tokenizer: a `GemmaTokenizer` or another `kmodels.text.Tokenizer`, its `to_dict`, or a path
            for `Tokenizer.from_file`.
        sequence_length: tokens of a row; may be set later.
        add_start_token: adds <bos>.
        add_end_token: adds <eos>; turns of a chat end with their own token instead.
        template: how records become text. "auto" formats messages with the tokenizer's chat
            template, or with "gemma" or "gemma4", depending on the vocabulary, if it has none, and
            other records as "instruction". "chat_template" formats all with the tokenizer's chat
            template. Others are "instruction", "alpaca", "gemma" and "gemma4" (the chat formats of
            the instruction-tuned models), or a text with {instruction}, {context} and {response}.
            Strings are not changed, nor are {prompts, responses} except in chat formats.
        loss_on: "all" tokens, or only "responses".
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Call:
        See `CausalLMPreprocessor`.
    """

    family = "gemma"
    tokenizer_class = GemmaTokenizer
    chats = CHATS
    reader = "Gemma 3"
    siblings = ("GemmaCausalLMPreprocessor", "Gemma3CausalLMPreprocessor")


class HubPreprocessor(TextOrImages, GemmaCausalLMPreprocessor):
    """A `GemmaCausalLMPreprocessor` with keras-hub's name, text-only or with images.

    The base of `Gemma3CausalLMPreprocessor` and `Gemma4CausalLMPreprocessor`.
    """

    image_argument = "image_converter"


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3CausalLMPreprocessor(HubPreprocessor):
    """`GemmaCausalLMPreprocessor` with keras-hub's arguments and default for Gemma 3.

    A `Gemma3ImageConverter` as `image_converter` creates a `Gemma3ImageTextLMPreprocessor`. Without
    it the numbers of images and of their tokens are not used. By default `loss_on` is "responses",
    so that prompts have weight 0; the other arguments are those of `GemmaCausalLMPreprocessor`.

    Raises:
        InputError: for images among the texts without an image converter.
    """

    order = PROMPT_ORDER_3
    image_family = "gemma_vision"
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

    A `Gemma4ImageConverter` as `image_converter` creates a `Gemma4ImageTextLMPreprocessor`. Without
    it the numbers of images, clips and frames are not used; `audio_converter` and `video_converter`
    must be None. By default `loss_on` is "responses", so that prompts have weight 0; the other
    arguments are those of `GemmaCausalLMPreprocessor`.

    Raises:
        InputError: for an audio or video converter.
    """

    order = PROMPT_ORDER_4
    image_family = "gemma4_vision"
    tokenizer_class = Gemma4Tokenizer

    @in_order(*PROMPT_ORDER_4)
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
    owner: str, arguments: Mapping[str, Any], left: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns a Gemma 4 preprocessor's arguments without those of audio and video, and `left`."""
    for name in ("audio_converter", "video_converter"):
        if arguments.get(name) is not None:
            raise InputError(f"{owner} reads neither audio nor video; leave {name} out")
    dropped = {"audio_converter", "video_converter", *SOUND, *left}
    return {name: x for name, x in arguments.items() if name not in dropped}
