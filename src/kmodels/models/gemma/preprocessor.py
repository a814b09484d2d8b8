"""Text to what a Gemma takes, and back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kmodels.errors import InputError
from kmodels.files import atomic_write
from kmodels.text import Cut, Example, Template, Tokenizer, Turns, encode, pack, pad
from kmodels.weights import native

# As in the chat template of the instruction-tuned checkpoints.
CHATS = {
    "gemma": Turns(
        user="<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
        model="<end_of_turn>",
        between="\n",
        tokens=("<start_of_turn>", "<end_of_turn>"),
    )
}
LOSS_ON = ("all", "responses")
SETTINGS_FILE = "preprocessor.json"


class GemmaCausalLMPreprocessor:
    """Turns texts into token ids, labels and weights; names and arguments as in keras-hub.

    Args:
        tokenizer: a `kmodels.text.Tokenizer`, what its `to_dict` gives, or a path that
            `Tokenizer.from_file` reads.
        sequence_length: tokens of a row; may be set later.
        add_start_token: put <bos> in front.
        add_end_token: put <eos> behind; a chat's turns end with their own token instead.
        template: how records become text: "instruction", "alpaca", "gemma" (the chat format of the
            instruction-tuned models), or a text with {instruction}, {context} and {response}.
            Strings go through as they are, and so do {prompts, responses} but for "gemma".
        loss_on: "all" tokens, or "responses" alone.

    Attributes:
        cut: a `kmodels.text.Cut`, what was cut off examples that were too long.

    Call:
        x: a string, a list of strings, a dictionary of "prompts" and "responses" (each one text or
            a list), or a list of records as `kmodels.text.read_records` gives them. Dictionaries
            that hold "token_ids" go through untouched.

        It gives ({"token_ids", "padding_mask"}, labels, weights), each (B, sequence_length), or
        (sequence_length,) for a single one; int32, weights float32. Labels are the next ids, and
        weigh 0 where they are padding or, with `loss_on="responses"`, of a prompt.

    Raises:
        InputError: for what is not text, a record that the template cannot write, or an example
            with nothing to learn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        template: str = "instruction",
        loss_on: str = "all",
    ):
        if isinstance(tokenizer, str | Path):
            tokenizer = Tokenizer.from_file(tokenizer)
        elif isinstance(tokenizer, Mapping):
            tokenizer = Tokenizer.from_dict(dict(tokenizer))
        if loss_on not in LOSS_ON:
            raise InputError(f"loss_on is {loss_on!r}; choose one of {', '.join(LOSS_ON)}")
        self.tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.add_start_token = add_start_token
        self.add_end_token = add_end_token
        self.loss_on = loss_on
        self.template = template
        self.cut = Cut()

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
        """How records become text."""
        return self._template.spec

    @template.setter
    def template(self, spec: str) -> None:
        template = Template(spec, CHATS)
        if template.turns:
            core = self.tokenizer.core
            if missing := [t for t in template.turns.tokens if core.token_to_id(t) is None]:
                raise InputError(
                    f"template {spec!r} needs the tokens {', '.join(missing)}, which the tokenizer "
                    "lacks; use template 'instruction'"
                )
        self._template = template

    def __call__(
        self, x: Any, y: Any = None, sample_weight: Any = None, sequence_length: int | None = None
    ) -> Any:
        """Token ids, labels and weights of texts, see the class."""
        if isinstance(x, Mapping) and "token_ids" in x:
            parts = (x, y, sample_weight)
            return parts if sample_weight is not None else parts[:2] if y is not None else x
        if y is not None or sample_weight is not None:
            raise InputError(
                "labels and weights are made from the texts; to learn responses only give "
                '{"prompts": ..., "responses": ...} with loss_on="responses"'
            )
        records, is_batch = _records(x)
        length = sequence_length or self.sequence_length
        x, labels, weights = pad(self.encode(records, length), length, self.tokenizer.pad_token_id)
        if is_batch:
            return x, labels, weights
        return {name: value[0] for name, value in x.items()}, labels[0], weights[0]

    def encode(self, records: Any, sequence_length: int | None = None) -> list[Example]:
        """Token ids of each record, not padded.

        Args:
            records: what the class takes.
            sequence_length: in place of the one set.

        Returns:
            An example for each, cut to `sequence_length + 1` tokens.
        """
        return encode(
            self.tokenizer,
            [self._template(record) for record in _records(records)[0]],
            (sequence_length or self.sequence_length) + 1,
            start=self.add_start_token,
            end=self.add_end_token,
            loss_on=self.loss_on,
            cut=self.cut,
        )

    def pack(
        self, records: Any, sequence_length: int | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Rows of several examples each, with the same loss for each example as alone.

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
        """Token ids of prompts.

        Args:
            x: what the class takes; records need no response, and a last reply is left out.
            sequence_length: tokens of a row; a longer prompt loses its end, as in keras-hub.

        Returns:
            {"token_ids", "padding_mask"}, each (B, length) int32, or (length,) for a single one.
        """
        records, is_batch = _records(x)
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
        """Text of token ids, without special tokens and padding.

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
        """Arguments that make an equal one, as plain values; the tokenizer is in it."""
        return {"tokenizer": self.tokenizer.to_dict(), **self._settings()}

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and the settings.

        Args:
            directory: where to.
        """
        self.tokenizer.save(directory)
        text = json.dumps(self._settings(), indent=2) + "\n"
        atomic_write(Path(directory) / SETTINGS_FILE, lambda at: at.write_text(text))

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """The preprocessor of a directory or a file.

        Args:
            preset: a directory that a model's `save_to_preset` wrote, or what
                `Tokenizer.from_file` reads; the settings in it are taken over.
            **settings: arguments to change.

        Returns:
            A preprocessor with that tokenizer.

        Raises:
            InputError: for files that are missing, damaged, or no tokenizer.
        """
        own = _json(Path(preset) / "config.json").get("preprocessor")
        if isinstance(own, dict) and "tokenizer" in own:
            native.verify_tokenizer(Path(preset), own)
            return cls(**{**own, "tokenizer": Path(preset) / own["tokenizer"], **settings})
        settings = {**_json(Path(preset) / SETTINGS_FILE), **settings}
        return cls(Tokenizer.from_file(preset), **settings)


class Gemma3CausalLMPreprocessor(GemmaCausalLMPreprocessor):
    """`GemmaCausalLMPreprocessor` by keras-hub's name for Gemma 3."""


def _json(path: Path) -> dict[str, Any]:
    """What a file of settings holds; nothing where it is not there."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def _records(x: Any) -> tuple[list[Any], bool]:
    """Texts or records one by one, and whether there was more than one to begin with."""
    if isinstance(x, str | bytes):
        return [_text(x)], False
    if isinstance(x, Mapping):
        if "messages" in x:
            return [dict(x)], False
        columns = {name: value for name, value in x.items() if value is not None}
        if all(isinstance(value, str | bytes) for value in columns.values()):
            return [{name: _text(value) for name, value in columns.items()}], False
        lists = {name: [_text(item) for item in _plain(value)] for name, value in columns.items()}
        if len(sizes := {len(column) for column in lists.values()}) > 1:
            raise InputError(
                "the columns differ in length: "
                + ", ".join(f"{name} {len(column)}" for name, column in lists.items())
            )
        names, rows = list(lists), range(sizes.pop() if sizes else 0)
        return [{name: lists[name][row] for name in names} for row in rows], True
    values = _plain(x)
    if not isinstance(values, list):
        return [_text(values)], False
    return [_bare(v) if isinstance(v, Mapping) else _text(v) for v in values], True


def _plain(x: Any) -> Any:
    """Lists, arrays and tensors of text as lists."""
    if isinstance(x, Sequence):
        return list(x)
    array = np.asarray(x)
    if array.dtype.kind not in "OUS" or array.ndim > 1:
        raise InputError(f"{type(x).__name__} of {array.dtype} where text belongs")
    return array.tolist()


def _bare(value: Any) -> Any:
    """A record in which data loaders made arrays of the texts, without them."""
    if isinstance(value, np.ndarray):
        return _bare(value.tolist())
    if isinstance(value, Mapping):
        return {name: _bare(part) for name, part in value.items()}
    return [_bare(part) for part in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"a text is not UTF-8 at byte {error.start + 1}") from error
    if not isinstance(value, str):
        raise InputError(f"{type(value).__name__} where text belongs")
    return value
