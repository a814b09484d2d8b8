"""Text to what a causal model takes, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.core.files import atomic_write, local_path
from kmodels.models.common.preprocessing import SETTINGS_FILE, Preprocessor
from kmodels.models.common.records import one_by_one
from kmodels.models.common.tokenizer import LayerTokenizer
from kmodels.text import Cut, Example, Template, Tokenizer, Turns, encode, pack, pad
from kmodels.text.texts import in_graph
from kmodels.weights import native
from kmodels.weights.readers import read_json

LOSS_ON = ("all", "responses")


class CausalLMPreprocessor(Preprocessor):
    """Turns texts into token ids, labels and weights; names and arguments as in keras-hub.

    The base of each family's own, which names its tokenizer and its chat formats.

    Args:
        tokenizer: a `kmodels.text.Tokenizer`, as the family's own is, what its `to_dict`
            gives, or a path that `Tokenizer.from_file` reads.
        sequence_length: tokens of a row; may be set later.
        add_start_token: put <bos> in front.
        add_end_token: put <eos> behind; a chat's turns end with their own token instead.
        template: how records become text: "instruction", "alpaca", a name of the family's chat
            formats, or a text with {instruction}, {context} and {response}. Strings go through as
            they are, and so do {prompts, responses} but for chat formats.
        loss_on: "all" tokens, or "responses" alone.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Attributes:
        cut: a `kmodels.text.Cut`, what was cut off examples that were too long.
        tokenizer_class: the family's tokenizer.
        chats: the family's chat formats by name.
        reader: of the texts, in errors.
        siblings: names of the family's other preprocessors, whose files this one reads.

    Call:
        x: a string, a list of strings, a dictionary of "prompts" and "responses" (each one text or
            a list), or a list of records as `kmodels.text.read_records` gives them. Dictionaries
            that hold "token_ids" go through untouched. Texts may be tensors of strings, also
            inside `tf.data.Dataset.map`.
        y: None; labels are made from the texts.
        sample_weight: one number for each text, which its weights are multiplied by.
        sequence_length: in place of the one set.

        It gives ({"token_ids", "padding_mask"}, labels, weights), each (B, sequence_length), or
        (sequence_length,) for a single one; int32, weights float32. Labels are the next ids, and
        weigh 0 where they are padding or, with `loss_on="responses"`, of a prompt.

    Raises:
        InputError: for what is not text, a record that the template cannot write, or an example
            with nothing to learn.
    """

    tokenizer_class: ClassVar[type[LayerTokenizer]]
    chats: ClassVar[Mapping[str, Turns]] = {}
    reader: ClassVar[str] = "the model"
    siblings: ClassVar[tuple[str, ...]] = ()
    tokenizer: Tokenizer

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        template: str = "instruction",
        loss_on: str = "all",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if loss_on not in LOSS_ON:
            raise InputError(f"loss_on is {loss_on!r}; choose one of {', '.join(LOSS_ON)}")
        self.tokenizer = self._tokenizer(tokenizer)
        self.sequence_length = sequence_length
        self.add_start_token = add_start_token
        self.add_end_token = add_end_token
        self.loss_on = loss_on
        self.template = template
        self.cut = Cut()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keras' own, but that a tokenizer is no part of a model, though it may be a layer."""
        if name == "tokenizer":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _tokenizer(self, given: Any) -> Tokenizer:
        if isinstance(given, str | Path):
            return self.tokenizer_class.from_file(given)
        if isinstance(given, Mapping):
            if "class_name" in given:
                return keras.saving.deserialize_keras_object(dict(given))
            return self.tokenizer_class.from_dict(dict(given))
        if not isinstance(given, Tokenizer):
            raise InputError(
                f"tokenizer is a {type(given).__name__}; give a "
                f"{self.tokenizer_class.__name__}, or the path of a tokenizer"
            )
        return given

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self._sequence_length

    @sequence_length.setter
    def sequence_length(self, value: int) -> None:
        if not isinstance(value, int | np.integer) or value < 2:
            raise InputError(f"sequence_length is {value!r}; give a whole number from 2 on")
        self._sequence_length = int(value)

    @property
    def template(self) -> str:
        """The template by which records become text."""
        return self._template.spec

    @template.setter
    def template(self, spec: str) -> None:
        template = Template(spec, self.chats)
        if template.turns:
            core = self.tokenizer.core
            if missing := [t for t in template.turns.tokens if core.token_to_id(t) is None]:
                raise InputError(
                    f"template {spec!r} needs the tokens {', '.join(missing)}, which the tokenizer "
                    "lacks; use template 'instruction'"
                )
        self._template = template

    def call(
        self, x: Any, y: Any = None, sample_weight: Any = None, sequence_length: int | None = None
    ) -> Any:
        """Returns token ids, labels and weights of texts, see the class."""
        if isinstance(x, Mapping) and "token_ids" in x:
            parts = (x, y, sample_weight)
            return parts if sample_weight is not None else parts[:2] if y is not None else x
        if y is not None:
            raise InputError(
                "labels are made from the texts; to learn responses only give "
                '{"prompts": ..., "responses": ...} with loss_on="responses"'
            )
        records, is_batch = one_by_one(x, self.reader)
        length = sequence_length or self.sequence_length
        x, labels, weights = pad(self.encode(records, length), length, self.tokenizer.pad_token_id)
        if sample_weight is not None:
            weights = weights * _per_row(sample_weight, len(weights))
        if is_batch:
            return x, labels, weights
        return {name: value[0] for name, value in x.items()}, labels[0], weights[0]

    def compute_output_spec(
        self, x: Any, y: Any = None, sample_weight: Any = None, sequence_length: int | None = None
    ) -> Any:
        """Returns shapes and dtypes of what `call` gives for symbolic texts."""
        if isinstance(x, Mapping) and "token_ids" in x:
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        ids = self._inputs_spec(x, sequence_length)
        shape = ids["token_ids"].shape
        return ids, keras.KerasTensor(shape, "int32"), keras.KerasTensor(shape, "float32")

    def _inputs_spec(self, x: Any, sequence_length: int | None) -> dict[str, Any]:
        first = keras.tree.flatten(x)[0]
        if first.dtype != "string" or len(first.shape) > 1:
            raise InputError(
                f"the preprocessor got {first.dtype} with {len(first.shape)} axes in tf.data; give "
                "strings, single or batched once"
            )
        shape = (*first.shape, sequence_length or self.sequence_length)
        return {name: keras.KerasTensor(shape, "int32") for name in ("token_ids", "padding_mask")}

    def encode(self, records: Any, sequence_length: int | None = None) -> list[Example]:
        """Returns token ids of each record, not padded.

        Args:
            records: what the class takes.
            sequence_length: in place of the one set.

        Returns:
            An example for each, cut to `sequence_length + 1` tokens.
        """
        return encode(
            self.tokenizer,
            [self._template(record) for record in one_by_one(records, self.reader)[0]],
            (sequence_length or self.sequence_length) + 1,
            start=self.add_start_token,
            end=self.add_end_token,
            loss_on=self.loss_on,
            cut=self.cut,
        )

    def pack(
        self, records: Any, sequence_length: int | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns rows of several examples each, with the same loss for each example as alone.

        Args:
            records: what the class takes.
            sequence_length: in place of the one set.

        Returns:
            As the class gives, with "segment_ids" and "positions" in the dictionary; there are
            fewer rows than examples.
        """
        length = sequence_length or self.sequence_length
        return pack(self.encode(records, length), length, self.tokenizer.pad_token_id)

    def generate_preprocess(self, x: Any, sequence_length: int | None = None) -> dict[str, Any]:
        """Returns token ids of prompts.

        Args:
            x: what the class takes; records need no response, and a last reply is left out.
            sequence_length: tokens of a row; a longer prompt loses its end, as in keras-hub.

        Returns:
            {"token_ids", "padding_mask"}, each (B, length) int32, or (length,) for a single one.
        """
        if in_graph(keras.tree.flatten(x)[0]):
            from kmodels.models.common import preprocessing_tensorflow

            settings = {"sequence_length": sequence_length}
            return preprocessing_tensorflow.call(_Prompts(self), (x, None, None), settings)
        records, is_batch = one_by_one(x, self.reader)
        length = sequence_length or self.sequence_length
        written = [self._template(record, reply=False) for record in records]
        texts = ["".join(part.text for part in parts) for parts, _ in written]
        start = [] if self.tokenizer.start_token_id is None else [self.tokenizer.start_token_id]
        ids = np.full((len(texts), length), self.tokenizer.pad_token_id, "int32")
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(self.tokenizer.tokenize(texts)):
            tokens = (tokens if tokens[:1] == start else start + tokens)[:length]
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        if not is_batch:
            ids, mask = ids[0], mask[0]
        return {"token_ids": ids, "padding_mask": mask}

    def generate_postprocess(self, x: Mapping[str, Any]) -> Any:
        """Returns text of token ids, without special tokens and padding.

        Args:
            x: {"token_ids", "padding_mask"}, each (B, T) or (T,).

        Returns:
            A list of texts, or a text.
        """
        ids, mask = np.asarray(x["token_ids"]), np.asarray(x["padding_mask"]).astype(bool)
        if ids.ndim == 1:
            return self.tokenizer.detokenize(ids[mask])
        return [self.tokenizer.detokenize(i[m]) for i, m in zip(ids, mask, strict=True)]

    def _settings(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "add_start_token": self.add_start_token,
            "add_end_token": self.add_end_token,
            "template": self.template,
            "loss_on": self.loss_on,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns arguments that make an equal one, as plain values; the tokenizer is in it."""
        tokenizer = self.tokenizer
        is_layer = isinstance(tokenizer, keras.layers.Layer)
        held = keras.saving.serialize_keras_object(tokenizer) if is_layer else tokenizer.to_dict()
        return {"tokenizer": held, **self._settings()}

    def save_to_preset(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and the settings, for `from_preset`.

        Args:
            directory: where to; not that of a model, which is saved with its preprocessor.

        Raises:
            InputError: for the directory of a model.
        """
        folder = local_path(directory)
        self._check_folder(folder)
        self.tokenizer.save(folder)
        held = {"class_name": type(self).__name__, "config": self._settings()}
        text = json.dumps(held, indent=2) + "\n"
        atomic_write(folder / SETTINGS_FILE, lambda at: at.write_text(text, encoding="utf-8"))

    def save(self, directory: str | Path) -> None:
        """Same as `save_to_preset`."""
        self.save_to_preset(directory)

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the preprocessor of a directory or a file.

        Args:
            preset: a directory that `save_to_preset` of a model or a preprocessor wrote, or what
                `Tokenizer.from_file` reads; the settings in it are taken over.
            **settings: arguments to change.

        Raises:
            InputError: for files that are missing, damaged, or no tokenizer.
        """
        path = presets.locate(preset)
        own = _json(path / "config.json").get("preprocessor")
        if isinstance(own, dict) and "tokenizer" in own:
            native.verify_tokenizer(path, own)
            return cls(**{**own, "tokenizer": path / own["tokenizer"], **settings})
        held = _json(path / SETTINGS_FILE)
        if (kind := held.get("class_name", cls.__name__)) not in (cls.__name__, *cls.siblings):
            raise InputError(f"{path / SETTINGS_FILE} holds a {kind}, not a {cls.__name__}")
        # Files written before preprocessors were layers hold the settings alone.
        settings = {**held.get("config", held), **settings}
        return cls(cls.tokenizer_class.from_file(path), **settings)


class _Prompts:
    """`generate_preprocess` in the form in which tf.data calls a preprocessor."""

    def __init__(self, preprocessor: CausalLMPreprocessor):
        self.preprocessor = preprocessor

    def call(self, x: Any, y: Any, sample_weight: Any, **settings: Any) -> dict[str, Any]:
        return self.preprocessor.generate_preprocess(x, **settings)

    def compute_output_spec(
        self, x: Any, y: Any, sample_weight: Any, sequence_length: int | None
    ) -> dict[str, Any]:
        return self.preprocessor._inputs_spec(x, sequence_length)


def _json(path: Path) -> dict[str, Any]:
    """Returns what a file of settings holds; nothing where it is not there."""
    return read_json(path) if path.is_file() else {}


def _per_row(sample_weight: Any, rows: int) -> np.ndarray:
    """Returns weights of texts, to multiply those of their tokens with."""
    found = np.asarray(sample_weight, "float32").reshape(-1, 1)
    if len(found) != rows:
        raise InputError(f"there are {len(found)} sample weights for {rows} texts; give one each")
    return found
