"""Gemma's tokenizers as Keras layers, with the names and arguments of keras-hub's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tokenizers

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike
from kmodels.models.common.hub_order import in_order
from kmodels.models.common.tokenizer import LayerTokenizer
from kmodels.text import sentencepiece
from kmodels.text.marks import ENDS_OF_TURNS, TURNS

# The argument that asks for tokens, and the attribute that each of them has.
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
        proto: the path of a SentencePiece model, its content, or that in base64; also a
            `tokenizers.Tokenizer`.
        sequence_length: rows are cut and filled with the padding token to this many ids.
        dtype: dtype of the tokens: "int32", "int64", or "string" for their texts.
        add_bos: puts the start token in front.
        add_eos: puts the end token behind; it may be cut off.
        start: text of the start token; by default the one that the file defines, else <bos>.
        end: text of the end token; by default the one that the file defines, else <eos>.
        pad: text of the padding token; by default the one that the file defines, else <pad>.
        stop: see `Tokenizer`.
        settings: see `Tokenizer`.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        A text, a list or an array of texts, or a tensor of strings, also inside
        `tf.data.Dataset.map` -> a list of ids or a list of such lists; inside tf.data a tensor,
        ragged for a batch.

    Raises:
        InputError: for a file that is not a SentencePiece model or lacks <bos>, <eos> or <pad>, or
            another dtype.
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
        if content is not None:
            self._check_special_tokens(pad)

    def _check_special_tokens(self, pad: str | None) -> None:
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
        """The content of a SentencePiece model with these ids.

        Raises:
            InputError: for a tokenizer that such a file cannot describe.
        """
        return self.to_sentencepiece() if self._proto is None else self._proto


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Tokenizer(GemmaTokenizer):
    """`GemmaTokenizer` with keras-hub's names for the tokens of images.

    Args:
        proto: as `GemmaTokenizer`, like all that is not listed.
        has_vision_tokens: True asks for <img>, <start_of_image> and <end_of_image> in the
            vocabulary; by default they may be absent, and False leaves them alone.
        **kwargs: of `GemmaTokenizer`.

    Attributes:
        image_placeholder_id: id of <img>, -1 where it is absent or left alone.
        start_of_image_token_id: id of <start_of_image>, likewise.
        end_of_image_token_id: id of <end_of_image>, likewise.

    Raises:
        InputError: for tokens that are to be there and are not.
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
        proto: as `GemmaTokenizer`, like all that is not listed.
        has_vision_tokens: True asks for <|image|>, <|image> and <image|> in the vocabulary; by
            default they may be absent, and False leaves them alone.
        has_audio_tokens: the same for <|audio|>, <|audio> and <audio|>.
        has_video_tokens: the same for <|video|>, <|video> and <video|>.
        **kwargs: of `GemmaTokenizer`.

    Attributes:
        image_placeholder_id: id of <|image|>, -1 where it is absent or left alone; the other tokens
            have such an attribute too, such as `start_of_image_token_id`.

    Raises:
        InputError: for tokens that are to be there and are not.
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
    """Sets the attributes of tokens and of their ids.

    Raises:
        InputError: for tokens that are to be there and are not.
    """
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
