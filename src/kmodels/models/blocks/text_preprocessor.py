"""Preprocessors of texts: token ids of one length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.core.schema import read_optional
from kmodels.core.types import Data
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.generation.request import pad_rows
from kmodels.models.blocks.preprocessing import SETTINGS_FILE, Preprocessor
from kmodels.models.blocks.tokenizer import LayerTokenizer
from kmodels.text import Cut, Tokenizer
from kmodels.text.records import PICTURES, holds_pictures
from kmodels.text.texts import as_list, as_text


class TextPreprocessor(Preprocessor):
    """Turns texts into token ids and a mask; names and arguments as in keras-hub.

    The base of each family's own, which names its tokenizer.

    Args:
        tokenizer: a `kmodels.text.Tokenizer`, such as the family's, its `to_dict`, or a path for
            `Tokenizer.from_file`.
        sequence_length: tokens of a row; may be set later.
        add_start_token: puts the start token in front.
        add_end_token: appends the end token, also if a text is cut.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Attributes:
        tokenizer_class: the family's tokenizer.
        reader: name of the model, for errors.
        siblings: names of the family's other preprocessors, whose files this one reads.
        cut: a `kmodels.text.Cut`, which counts the tokens of texts that were too long.

    Call:
        x: a text, a list of texts, or a dictionary of "prompts" (one text or a list); strings,
            bytes, arrays, or tensors of strings, also inside `tf.data.Dataset.map`. Dictionaries
            that hold "token_ids" go through untouched.
        y, sample_weight: handed through.
        sequence_length: in place of the one set.

        It gives {"token_ids", "padding_mask"}, each (B, sequence_length) int32, or
        (sequence_length,) for a single text; with y or weights a tuple, as Keras' preprocessors.

    Raises:
        InputError: for anything but text.
    """

    tokenizer_class: ClassVar[type[LayerTokenizer]]
    reader: ClassVar[str] = "the model"
    siblings: ClassVar[tuple[str, ...]] = ()
    tokenizer: Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.tokenizer = tokenizer  # type: ignore[assignment]
        self.sequence_length = sequence_length
        self.add_start_token = add_start_token
        self.add_end_token = add_end_token
        self.cut = Cut()

    def __setattr__(self, name: str, value: object) -> None:
        """Keras' own, but that a tokenizer is not a part of a model, though it may be a layer."""
        if name == "tokenizer":
            object.__setattr__(self, name, self._tokenizer(value))
        else:
            super().__setattr__(name, value)

    def _tokenizer(self, tokenizer: object) -> Tokenizer:
        if isinstance(tokenizer, str | Path):
            return self.tokenizer_class.from_file(tokenizer)
        if isinstance(tokenizer, Mapping):
            if "class_name" in tokenizer:
                return keras.saving.deserialize_keras_object(dict(tokenizer))
            return self.tokenizer_class.from_dict(dict(tokenizer))
        if not isinstance(tokenizer, Tokenizer):
            raise InputError(
                f"tokenizer is a {type(tokenizer).__name__}; give a "
                f"{self.tokenizer_class.__name__}, or the path of a tokenizer"
            )
        return tokenizer

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self._sequence_length

    @sequence_length.setter
    def sequence_length(self, value: int) -> None:
        self._sequence_length = _length(value)

    def _row_length(self, sequence_length: int | None) -> int:
        """Returns the length that a call gives, or else the one set."""
        return self.sequence_length if sequence_length is None else _length(sequence_length)

    def call(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        sequence_length: int | None = None,
    ) -> Any:
        """Returns token ids and mask of texts, see the class."""
        if isinstance(x, Mapping) and "token_ids" in x:
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        return self._converted(x, y, sample_weight, self._row_length(sequence_length))

    def _converted(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        """Returns the results of `call` for data without token ids."""
        records, is_batch = one_by_one(x, self.reader)
        x = self._rows([self._text(record) for record in records], length)
        if not is_batch:
            x = {name: value[0] for name, value in x.items()}
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def _text(self, record: Mapping[str, str] | str) -> str:
        if isinstance(record, Mapping):
            if set(record) != {"prompts"}:
                raise InputError(
                    f'{self.reader} got {", ".join(record)}; give texts, or {{"prompts": texts}}'
                )
            return as_text(record["prompts"])
        return record

    @property
    def _end_token_id(self) -> int | None:
        return self.tokenizer.end_token_id

    def _rows(self, texts: list[str], length: int) -> dict[str, np.ndarray]:
        return self._padded(self.token_rows(texts, length), length)

    def token_rows(
        self, texts: list[str], sequence_length: int | None = None
    ) -> list[list[int | None]]:
        """Returns token ids between start and end token, cut to fit and not padded."""
        length = self._row_length(sequence_length)
        begins = self.add_start_token and self.tokenizer.start_token_id is not None
        start = [self.tokenizer.start_token_id] if begins else []
        end = [self._end_token_id] if self.add_end_token else []
        room = length - len(start) - len(end)
        rows = self.tokenizer.encode_batch(texts)
        excess = [len(tokens) - room for tokens in rows if len(tokens) > room]
        self.cut.examples += len(excess)
        self.cut.prompt_tokens += sum(excess)
        return [[*start, *tokens[:room], *end] for tokens in rows]

    def _padded(self, rows: Sequence[Sequence[int | None]], length: int) -> dict[str, np.ndarray]:
        """Returns token ids, cut or padded behind to one length, and their mask."""
        return pad_rows([row[:length] for row in rows], length, self.tokenizer.pad_token_id)

    def compute_output_spec(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        sequence_length: int | None = None,
    ) -> Any:
        """Returns shapes and dtypes of the results of `call` for symbolic texts."""
        if isinstance(x, Mapping) and "token_ids" in x:
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        return self._spec(x, y, sample_weight, self._row_length(sequence_length))

    def _spec(self, x: Data, y: Data, sample_weight: Data, length: int) -> Any:
        """Returns shapes and dtypes of the results of `_converted`."""
        return keras.utils.pack_x_y_sample_weight(self._inputs_spec(x, length), y, sample_weight)

    def _inputs_spec(self, x: Data, sequence_length: int | None) -> dict[str, Any]:
        first = keras.tree.flatten(x)[0]
        if first.dtype != "string" or len(first.shape) > 1:
            raise InputError(
                f"the preprocessor got {first.dtype} with {len(first.shape)} axes in tf.data; give "
                "strings, single or batched once"
            )
        shape = (*first.shape, self._row_length(sequence_length))
        return {name: keras.KerasTensor(shape, "int32") for name in ("token_ids", "padding_mask")}

    def _settings(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "add_start_token": self.add_start_token,
            "add_end_token": self.add_end_token,
        }

    def _arguments(self) -> dict[str, Any]:
        return self._settings()

    def to_dict(self) -> dict[str, Any]:
        """Returns arguments that make an equal one, as plain values; the tokenizer is in it."""
        tokenizer = self.tokenizer
        is_layer = isinstance(tokenizer, keras.layers.Layer)
        settings = (
            keras.saving.serialize_keras_object(tokenizer) if is_layer else tokenizer.to_dict()
        )
        return {"tokenizer": settings, **self._settings()}

    def _saved(self, folder: Path) -> dict[str, Any]:
        self.tokenizer.save(folder)
        return self._settings()

    def save(self, directory: str | Path) -> None:
        """Same as `save_to_preset`."""
        self.save_to_preset(directory)

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the preprocessor of a directory or a file.

        Args:
            preset: a directory that `save_to_preset` of a model or a preprocessor wrote, or a path
                for `Tokenizer.from_file`; its settings are used.
            **settings: arguments to change.

        Raises:
            InputError: for files that are missing, damaged, or no tokenizer.
        """
        path = presets.locate(preset)
        if not cls.family:
            return cls._class_of(path).from_preset(path, **settings)
        own = read_optional(path / "config.json").get("preprocessor")
        if isinstance(own, dict) and "tokenizer" in own:
            return cls(**{**presets.preprocessor_settings(cls, path), **settings})
        saved = read_optional(path / SETTINGS_FILE)
        if (kind := saved.get("class_name", cls.__name__)) not in (cls.__name__, *cls.siblings):
            raise InputError(f"{path / SETTINGS_FILE} holds a {kind}, not a {cls.__name__}")
        # Files written before preprocessors were layers hold the settings alone.
        settings = {**saved.get("config", saved), **settings}
        return cls(cls.tokenizer_class.from_file(path), **settings)


def _length(value: object) -> int:
    if not isinstance(value, int | np.integer) or value < 2:
        raise InputError(f"sequence_length is {value!r}; give a whole number from 2 on")
    return int(value)


def one_by_one(x: Data, reader: str = "the model") -> tuple[list[Any], bool]:
    """Returns texts or records one by one, and whether there was more than one to begin with."""
    if isinstance(x, str | bytes):
        return [as_text(x)], False
    if isinstance(x, Mapping):
        values, is_batch = rows_of(x)
    elif not isinstance(values := as_list(x), list):
        return [as_text(values)], False
    else:
        is_batch = True
    try:
        records = [_bare(v) if isinstance(v, Mapping) else as_text(v) for v in values]
    except RecursionError as error:
        raise InputError(f"{reader} got a record that is nested too deeply") from error
    if any(map(holds_pictures, records)):
        raise InputError(f"{reader} takes only text here; leave 'images' out")
    return list(map(_decoded, records)), is_batch


def check_same_fields(records: Sequence[Mapping[str, Any]]) -> None:
    """Raises `InputError` for a pair with other fields than the first one."""
    names = records[0].keys()
    for other in records:
        if not isinstance(other, Mapping) or other.keys() != names:
            fields = ", ".join(other) if isinstance(other, Mapping) else repr(other)
            raise InputError(
                f"one pair has {', '.join(names)} and another {fields}; give all the same"
            )


def rows_of(x: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Returns the records of columns, or the one record that x is, and whether it was columns."""
    columns = {name: value for name, value in x.items() if value is not None}
    singles = [_is_single(value) for name, value in columns.items() if name not in PICTURES]
    if all(singles):
        return [columns], False
    lists = {
        name: [value] if isinstance(value, str | bytes) else _listed(value)
        for name, value in columns.items()
    }
    if len(sizes := {len(column) for column in lists.values()}) > 1:
        raise InputError(
            "the columns differ in length: "
            + ", ".join(f"{name} {len(column)}" for name, column in lists.items())
        )
    return [{name: lists[name][row] for name in lists} for row in range(sizes.pop())], True


def _is_single(value: object) -> bool:
    """Returns whether this is a text, or the messages of one chat, and not a column of them."""
    if isinstance(value, str | bytes):
        return True
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(one, Mapping) for one in value)
    return getattr(value, "ndim", 0) == 0


def _listed(value: Any) -> list[Any]:
    if hasattr(value, "__array__"):
        value = to_numpy(value)
        return value.tolist() if value.dtype.kind in "OUST" else list(value)
    return list(value)


def _bare(value: object) -> Any:
    """Returns a record in which data loaders made arrays of the texts, without them."""
    if isinstance(value, np.ndarray):
        return _bare(value.tolist())
    if isinstance(value, Mapping):
        return {name: _bare(part) for name, part in value.items()}
    return [_bare(part) for part in value] if isinstance(value, list) else value


def _decoded(record: Any) -> Any:
    if not isinstance(record, Mapping):
        return record
    return {name: as_text(x) if isinstance(x, bytes) else x for name, x in record.items()}
