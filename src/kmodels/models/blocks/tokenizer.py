"""Tokenizers as Keras layers, with the methods of keras-hub's tokenizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import keras
import tokenizers

from kmodels.core.errors import InputError, check_names, check_whole
from kmodels.core.remote import local_copy
from kmodels.core.types import DTypeLike
from kmodels.presets.find import locate
from kmodels.text import Tokenizer, byte_level
from kmodels.text import settings as described
from kmodels.text.texts import as_text
from kmodels.text.tokenizer import add_named, read_core

VOCABULARY = ("vocab.json", "merges.txt")
DTYPES = ("int32", "int64", "string")


class LayerTokenizer(Tokenizer, keras.layers.Layer):
    """A `kmodels.text.Tokenizer` that is a Keras layer; the base of each family's own.

    A family's class makes the core of the files that keras-hub's takes, and hands it on. Its first
    argument takes a core too, from which `from_file` and `from_config` make it.

    Args:
        core: the tokenizer itself.
        sequence_length: rows are cut and filled with the padding token to this many ids.
        dtype: dtype of the tokens: "int32", "int64", or "string" for their texts.
        add_bos: puts the start token in front.
        add_eos: puts the end token behind; it may be cut off.
        start: text of the start token, see `Tokenizer`.
        end: text of the end token, see `Tokenizer`.
        pad: text of the padding token, see `Tokenizer`.
        stop: see `Tokenizer`.
        settings: see `Tokenizer`.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Attributes:
        unknown_token: text of the token whose id `token_to_id` returns for unknown text, or None.

    Call:
        A text, a list or an array of texts, or a tensor of strings, also inside
        `tf.data.Dataset.map` -> a list of ids or a list of such lists; inside tf.data a tensor,
        ragged for a batch.

    Raises:
        InputError: for another dtype.
    """

    unknown_token: str | None = None

    def __init__(
        self,
        core: tokenizers.Tokenizer,
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
        policy = keras.dtype_policies.get(dtype)
        if policy.compute_dtype not in DTYPES:
            raise InputError(f"dtype is {policy.name!r}; tokens are {', '.join(DTYPES)}")
        keras.layers.Layer.__init__(self, dtype=policy, **kwargs)
        Tokenizer.__init__(self, core, start, end, pad, stop, settings)
        self.sequence_length = sequence_length
        self.add_bos, self.add_eos = add_bos, add_eos
        self.built = True

    @property
    def sequence_length(self) -> int | None:
        """Ids of a row, or None for as many as the text has."""
        return self._sequence_length

    @sequence_length.setter
    def sequence_length(self, value: int | None) -> None:
        if value is not None:
            check_whole("sequence_length", value)
        self._sequence_length = value

    @property
    def output_dtype(self) -> str:
        """The dtype of the results of `tokenize` inside tf.data."""
        return self.compute_dtype

    def __call__(self, inputs: Any, *args: object, **kwargs: Any) -> Any:
        """Same as `tokenize`; Keras' own call would make tensors of the texts.

        Raises:
            InputError: for other arguments than Keras' `training`, which changes nothing.
        """
        if args:
            raise InputError(f"{type(self).__name__} takes one argument; give a list of texts")
        check_names(type(self).__name__, kwargs, ("training",))
        return self.tokenize(inputs)

    def _finish(self, row: list[int]) -> list[Any]:
        start = [self.start_token_id] if self.add_bos and self.start_token_id is not None else []
        row = [*start, *row, *([self.end_token_id] if self.add_eos else [])]
        if self.sequence_length is not None:
            row = row[: self.sequence_length]
            row += [self.pad_token_id] * (self.sequence_length - len(row))
        return [self.id_to_token(i) for i in row] if self.output_dtype == "string" else row

    def token_to_id(self, token: str | bytes) -> int:
        """Returns the id of a token, or of the unknown token, as keras-hub does."""
        token_id = self.core.token_to_id(as_text(token))
        if token_id is None and self.unknown_token is not None:
            token_id = self.core.token_to_id(self.unknown_token)
        return super().token_to_id(as_text(token)) if token_id is None else token_id

    def id_to_token(self, token_id: int) -> str:
        """Returns the text of a token.

        Raises:
            InputError: for an id outside the vocabulary, as in keras-hub.
        """
        text = self.core.id_to_token(int(token_id)) if token_id >= 0 else None
        if text is None:
            raise InputError(
                f"there is no token {token_id}; ids go from 0 to {self.vocabulary_size() - 1}"
            )
        return text

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, the vocabulary in place of the files."""
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
        """Returns the tokenizer of `get_config`."""
        config = dict(config)
        text = config.pop("json")
        core = read_core(lambda: tokenizers.Tokenizer.from_str(text), "the config")
        return cls(core, **config)

    def __reduce__(self) -> Any:
        return type(self).from_config, (self.get_config(),)

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the tokenizer of a checkpoint.

        Args:
            preset: a directory or file that `Tokenizer.from_file` reads, or an explicit "hf://" or
                "kaggle://" name.
            **settings: arguments to change.

        Raises:
            InputError: if there is no tokenizer.
        """
        tokenizer = cls.from_file(locate(preset))
        return cls.from_config({**tokenizer.get_config(), **settings}) if settings else tokenizer

    def save_to_preset(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, for `from_preset` and transformers."""
        self.save(directory)


class BytePairTokenizer(LayerTokenizer):
    """A `LayerTokenizer` of byte-level merges, with keras-hub's first arguments.

    Args:
        vocabulary: token to id, the path of a vocab.json, or a `tokenizers.Tokenizer`.
        merges: pairs of tokens with a blank between them, or the path of a merges.txt.
        bos_token: text of the start token; by default the one that the files name.
        eos_token: text of the end token; by default the one that the files name.
        misc_special_tokens: further control tokens.
        **kwargs: of `LayerTokenizer`.

    Attributes:
        control_tokens: control tokens of the family, which are cut out of a text before merges.
        build_core: makes the core of token to id, pairs and control tokens.

    Raises:
        InputError: for files that are missing or no vocabulary, and for merges or further control
            tokens beside a `tokenizers.Tokenizer`.
    """

    control_tokens: ClassVar[tuple[str, ...]] = ()
    build_core: ClassVar[Callable[..., tokenizers.Tokenizer]] = staticmethod(byte_level.build)

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer | Mapping[str, int] | str | Path,
        merges: Sequence[str] | str | Path | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        misc_special_tokens: Iterable[str] = (),
        **kwargs: Any,
    ):
        if isinstance(vocabulary, tokenizers.Tokenizer):
            if merges is not None or misc_special_tokens:
                raise InputError(
                    "a tokenizers.Tokenizer has its own merges and control tokens; leave out "
                    "merges and misc_special_tokens"
                )
        else:
            named = [*filter(None, (bos_token, eos_token)), *sorted(misc_special_tokens)]
            special = tuple(dict.fromkeys([*self.control_tokens, *named]))
            vocabulary = byte_level.read(vocabulary, merges, special, self.build_core)
        super().__init__(vocabulary, **{"start": bos_token, "end": eos_token, **kwargs})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """As `Tokenizer.from_file`; a directory may hold vocab.json and merges.txt as well."""
        folder = local_copy(path)
        files = [folder / name for name in VOCABULARY]
        if not all(file.is_file() for file in files) or (folder / "tokenizer.json").is_file():
            return super().from_file(folder)
        settings = described.read(folder, cls.idle_at)
        core = byte_level.read(files[0], files[1], cls.control_tokens, cls.build_core)
        add_named(core, settings, described.added_tokens(folder))
        return cls(core, settings=settings)
