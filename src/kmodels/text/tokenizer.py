"""Text to token ids and back, from the tokenizer files that models come with."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from kmodels.errors import InputError
from kmodels.files import atomic_write
from kmodels.text import gguf, sentencepiece, sentencepiece_writer

# Markers of turns, which older vocabulary files do not declare as control tokens.
TURNS = ("<start_of_turn>", "<end_of_turn>")
_USUAL = {
    "start": ("<bos>", "<s>", "<|begin_of_text|>"),
    "end": ("<eos>", "</s>", "<|end_of_text|>"),
    "pad": ("<pad>", "<|pad|>"),
}
FILES = ("tokenizer.json", "tokenizer.model")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the methods and names of keras-hub's tokenizers.

    Args:
        core: the tokenizer itself.
        start: text of the token that begins a sequence; found by its usual names by default.
        end: text of the token that ends one, likewise.
        pad: text of the padding token, likewise; where there is none, the end token serves.

    Attributes:
        start_token_id: id of the token that begins a sequence, None where there is none.
        end_token_id: id of the token that ends one.
        pad_token_id: id of the padding token.
        stop_token_ids: ids that end a generated text: the end token and the end of a turn.
        special_token_ids: ids that `detokenize` leaves out.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        start: str | None = None,
        end: str | None = None,
        pad: str | None = None,
    ):
        core.no_padding()
        core.no_truncation()
        self.core = core
        self.start_token = start or self._usual("start")
        self.end_token = end or self._usual("end")
        if self.end_token is None:
            raise InputError("the tokenizer has no end token: name one with end=")
        self.pad_token = pad or self._usual("pad") or self.end_token
        self.end_token_id = self.token_to_id(self.end_token)
        self.pad_token_id = self.token_to_id(self.pad_token)
        self.start_token_id: int | None = None
        if self.start_token is not None:
            self.start_token_id = self.token_to_id(self.start_token)
        self.stop_token_ids = [
            self.end_token_id,
            *(i for i in map(core.token_to_id, TURNS[1:]) if i is not None),
        ]
        added = core.get_added_tokens_decoder().items()
        self.special_token_ids = sorted(
            {i for i, token in added if token.special}
            | {self.end_token_id, self.pad_token_id}
            | ({self.start_token_id} if self.start_token_id is not None else set())
        )

    def _usual(self, role: str) -> str | None:
        return next((t for t in _USUAL[role] if self.core.token_to_id(t) is not None), None)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads the tokenizer of a model.

        Args:
            path: a tokenizer.json, a SentencePiece .model, a .gguf file, or a directory that holds
                tokenizer.json or tokenizer.model. A tokenizer_config.json beside it is heeded.

        Returns:
            A tokenizer with the ids of that model.

        Raises:
            InputError: if there is no such file or it is none of these.
        """
        path = Path(path)
        if path.is_dir():
            found = next((path / name for name in FILES if (path / name).is_file()), None)
            if found is None:
                raise InputError(f"{path} holds no tokenizer: neither {' nor '.join(FILES)}")
            path = found
        if not path.is_file():
            raise InputError(f"no tokenizer at {path}: no such file")
        if path.suffix == ".gguf":
            core, names = gguf.load(path, TURNS)
            return cls(core, **names)
        names = _names(path.parent)
        if path.suffix == ".model":
            return cls(sentencepiece.load(path, TURNS), **names)
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{path} is not a tokenizer.json: {_line(error)}") from error
        return cls(core, **names)

    @classmethod
    def from_sentencepiece(cls, model: bytes, origin: object = "the model") -> Self:
        """The tokenizer of a SentencePiece model that is in memory.

        Args:
            model: content of a .model file.
            origin: names it in errors.

        Raises:
            InputError: for what is no such model.
        """
        return cls(sentencepiece.parse(model, origin, TURNS))

    def to_sentencepiece(self) -> bytes:
        """The content of a SentencePiece .model file with the same ids and merges.

        Raises:
            InputError: for a tokenizer that such a file cannot describe.
        """
        return sentencepiece_writer.dump(
            self.core,
            {
                "bos": self.start_token_id,
                "eos": self.end_token_id,
                "pad": self.pad_token_id,
            },
            TURNS,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The tokenizer of `to_dict`."""
        core = tokenizers.Tokenizer.from_str(fields["json"])
        return cls(core, fields["start"], fields["end"], fields["pad"])

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, to go into a config."""
        return {"json": self.core.to_str(), **self._roles()}

    def _roles(self) -> dict[str, str | None]:
        return {"start": self.start_token, "end": self.end_token, "pad": self.pad_token}

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers reads too.

        Args:
            directory: where to; it is made where it is missing.
        """
        directory = Path(directory)
        core = tokenizers.Tokenizer.from_str(self.core.to_str())
        if self.start_token is not None and core.post_processor is None:
            core.post_processor = TemplateProcessing(
                single=f"{self.start_token} $A",
                pair=f"{self.start_token} $A {self.start_token} $B",
                special_tokens=[(self.start_token, self.start_token_id)],
            )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.start_token,
            "eos_token": self.end_token,
            "pad_token": self.pad_token,
            "clean_up_tokenization_spaces": False,
        }
        atomic_write(directory / "tokenizer.json", lambda at: core.save(str(at), pretty=False))
        atomic_write(
            directory / "tokenizer_config.json",
            lambda at: at.write_text(json.dumps(config, indent=2) + "\n"),
        )

    def vocabulary_size(self) -> int:
        """Number of ids, the tokens added later included."""
        return self.core.get_vocab_size()

    def token_to_id(self, token: str) -> int:
        """The id of a token; InputError if there is none."""
        found = self.core.token_to_id(token)
        if found is None:
            raise InputError(f"the tokenizer has no token {token!r}")
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """The text of a token, None for an id outside the vocabulary."""
        return self.core.id_to_token(token_id)

    def __call__(self, x: Any) -> Any:
        """Same as `tokenize`."""
        return self.tokenize(x)

    def tokenize(self, x: str | Sequence[str]) -> Any:
        """Token ids, without start and end tokens.

        Args:
            x: a text, or several.

        Returns:
            A list of ids, or a list of such lists.

        Raises:
            InputError: for what is not text, or holds half of a surrogate pair.
        """
        if isinstance(x, str):
            return self._encode([x])[0]
        return self._encode(list(x))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        try:
            return [e.ids for e in self.core.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            raise InputError(f"this is not text: {_line(error)}") from error

    def detokenize(self, ids: Any) -> Any:
        """Text without special tokens.

        Args:
            ids: a sequence of ids, or a batch of such sequences.

        Returns:
            A text, or a list of texts.
        """
        rows = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if rows and isinstance(rows[0], Iterable):
            return [self.detokenize(row) for row in rows]
        leave = set(self.special_token_ids)
        kept = [int(i) for i in rows if int(i) not in leave]
        return self.core.decode(kept, skip_special_tokens=True)


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _names(directory: Path) -> dict[str, str]:
    """Start, end and padding token as a tokenizer_config.json names them."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    names = {}
    for role, key in (("start", "bos_token"), ("end", "eos_token"), ("pad", "pad_token")):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[role] = token
    return names
