"""Gemma's tokenizers as Keras layers, with the names and arguments of keras-hub's."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import keras
import tokenizers

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.core.remote import local_copy
from kmodels.text import Tokenizer, sentencepiece
from kmodels.text.texts import as_text
from kmodels.text.tokenizer import TURNS

DTYPES = ("int32", "int64", "string")
# keras-hub takes a text that is longer, and in base64, for the content of a file.
LONGEST_PATH = 2048
PICTURES = {
    "<img>": "image_placeholder",
    "<start_of_image>": "start_of_image_token",
    "<end_of_image>": "end_of_image_token",
}


@keras.saving.register_keras_serializable(package="kmodels")
class GemmaTokenizer(Tokenizer, keras.layers.Layer):
    """A `kmodels.text.Tokenizer` that is a Keras layer, as keras-hub's class of this name.

    Args:
        proto: the path of a SentencePiece model, its content, or that in base64; also a
            `tokenizers.Tokenizer`.
        sequence_length: rows are cut and filled with the padding token to this many ids.
        dtype: of the tokens: "int32", "int64", or "string" for their texts.
        add_bos: puts the start token in front.
        add_eos: puts the end token behind; it may be cut off.
        start: text of the start token; found by its usual name by default.
        end: text of the end token, likewise.
        pad: text of the padding token, likewise.
        stop: see `Tokenizer`.
        settings: see `Tokenizer`.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Call:
        A text, a list or an array of texts, or a tensor of strings, also inside
        `tf.data.Dataset.map` -> a list of ids or a list of such lists; inside tf.data a tensor,
        ragged for a batch.

    Raises:
        InputError: for a file that is no SentencePiece model or lacks <bos>, <eos> or <pad>, or
            another dtype.
    """

    def __init__(
        self,
        proto: Any,
        sequence_length: int | None = None,
        dtype: Any = "int32",
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
        policy = keras.dtype_policies.get(dtype)
        if policy.compute_dtype not in DTYPES:
            raise InputError(f"dtype is {policy.name!r}; tokens are {', '.join(DTYPES)}")
        if sequence_length is not None:
            check_whole("sequence_length", sequence_length)
        keras.layers.Layer.__init__(self, dtype=policy, **kwargs)
        self._proto: bytes | None = None
        if isinstance(proto, tokenizers.Tokenizer):
            core = proto
        else:
            self._proto, origin = _content(proto)
            core = sentencepiece.parse(self._proto, origin, TURNS)
        Tokenizer.__init__(self, core, start, end, pad, stop, settings)
        if self._proto is not None:
            self._check_special_tokens(pad)
        self.sequence_length = sequence_length
        self.add_bos, self.add_eos = add_bos, add_eos
        self.built = True

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

    @property
    def output_dtype(self) -> str:
        """The dtype of what `tokenize` gives inside tf.data."""
        return self.compute_dtype

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Same as `tokenize`; Keras' own call would make tensors of the texts."""
        return self.tokenize(inputs)

    def _finish(self, row: list[int]) -> list[Any]:
        start = [self.start_token_id] if self.add_bos and self.start_token_id is not None else []
        row = [*start, *row, *([self.end_token_id] if self.add_eos else [])]
        if self.sequence_length is not None:
            row = row[: self.sequence_length]
            row += [self.pad_token_id] * (self.sequence_length - len(row))
        return [self.id_to_token(i) for i in row] if self.output_dtype == "string" else row

    def token_to_id(self, token: str | bytes) -> int:
        """The id of a token; that of the unknown token for one that is not there, as keras-hub."""
        found = self.core.token_to_id(as_text(token))
        if found is None:
            found = self.core.token_to_id("<unk>")
        return super().token_to_id(as_text(token)) if found is None else found

    def id_to_token(self, token_id: int) -> str:
        """The text of a token.

        Raises:
            InputError: for an id outside the vocabulary, as in keras-hub.
        """
        found = self.core.id_to_token(int(token_id)) if token_id >= 0 else None
        if found is None:
            raise InputError(
                f"there is no token {token_id}; ids go from 0 to {self.vocabulary_size() - 1}"
            )
        return found

    def get_config(self) -> dict[str, Any]:
        """The arguments, the vocabulary in place of `proto`."""
        return {
            "name": self.name,
            "dtype": self.output_dtype,
            "sequence_length": self.sequence_length,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            **self.to_dict(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The tokenizer of `get_config`."""
        config = dict(config)
        return cls(tokenizers.Tokenizer.from_str(config.pop("json")), **config)

    def __reduce__(self) -> Any:
        return _from_config, (type(self), self.get_config())

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """The tokenizer of a checkpoint.

        Args:
            preset: a directory or file that `Tokenizer.from_file` reads, or an explicit "hf://" or
                "kaggle://" name.
            **settings: arguments to change.

        Raises:
            InputError: where there is no tokenizer.
        """
        found = cls.from_file(presets.locate(preset))
        return cls.from_config({**found.get_config(), **settings}) if settings else found

    def save_to_preset(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, for `from_preset` and transformers."""
        self.save(directory)


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma3Tokenizer(GemmaTokenizer):
    """`GemmaTokenizer` with keras-hub's names for the tokens of pictures.

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

    def __init__(self, proto: Any, has_vision_tokens: bool | None = None, **kwargs: Any):
        super().__init__(proto, **kwargs)
        self.has_vision_tokens = has_vision_tokens
        wanted = {} if has_vision_tokens is False else PICTURES
        found = {text: self.core.token_to_id(text) for text in wanted}
        if has_vision_tokens and (absent := [text for text, i in found.items() if i is None]):
            raise InputError(
                f"the vocabulary has no {', '.join(absent)}; give has_vision_tokens=False for a "
                "model of text alone"
            )
        for text, name in PICTURES.items():
            setattr(self, name, text)
            setattr(self, f"{name}_id", -1 if found.get(text) is None else found[text])

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {**super().get_config(), "has_vision_tokens": self.has_vision_tokens}


def _from_config(cls: type[GemmaTokenizer], config: dict[str, Any]) -> GemmaTokenizer:
    return cls.from_config(config)


def _content(proto: Any) -> tuple[bytes, object]:
    """The content of a SentencePiece model, and its name in errors."""
    if isinstance(proto, bytes):
        return proto, "proto"
    if not isinstance(proto, str | Path):
        raise InputError(
            f"proto is a {type(proto).__name__}; give the path of a SentencePiece model, or its "
            "content as bytes"
        )
    if isinstance(proto, str) and len(proto) > LONGEST_PATH:
        try:
            return base64.b64decode(proto, validate=True), "proto"
        except binascii.Error:
            pass
    try:
        return local_copy(proto).read_bytes(), proto
    except OSError as error:
        raise InputError(f"{str(proto)[:200]} cannot be read: {error.strerror}") from error
