"""The vocabulary inside a GGUF file."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from kmodels.core.errors import InputError
from kmodels.text import byte_level
from kmodels.text import pieces as build
from kmodels.weights.gguf import open_gguf, setting

# Pieces of a text that two tokenizers are compared on.
ASKED = 1000


def load(
    path: str | Path, special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str], dict[str, Any]]:
    """Returns the tokenizer of a GGUF file, the names of its special tokens, and its chat template.

    Args:
        path: a .gguf file with a SentencePiece vocabulary, as llama.cpp writes for Gemma, or with
            byte-level merges as for Qwen.
        special: pieces to treat as control tokens though the file says otherwise.

    Returns:
        The tokenizer, a dictionary with "start", "end" and "pad" where the file names them, and
        one with "chat_template" where it has one.

    Raises:
        InputError: for another kind of vocabulary, or where the gguf package is missing.
    """
    reader = open_gguf(path)

    def value(name: str, default: object = None) -> Any:
        return setting(reader, f"tokenizer.ggml.{name}", default)

    kind, texts, cut = value("model"), value("tokens"), value("pre")
    merged = kind == "gpt2" and cut in byte_level.PATTERNS
    if not (kind == "llama" or merged) or not texts:
        if kind == "gpt2":
            kind = f"gpt2 with pre={cut}"
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; 'llama' (SentencePiece) is read, "
            f"and 'gpt2' with pre={' or '.join(byte_level.PATTERNS)}; or give the directory of a "
            "tokenizer.json"
        )
    template = setting(reader, "tokenizer.chat_template", None)
    settings = {} if template is None else {"chat_template": template}
    try:
        make = _build_merged if merged else _build
        return *make(texts, value, special), settings
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(
            f"{path} holds a damaged vocabulary: {' '.join(str(error).split())}; copy it again"
        ) from None


def _build(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...]
) -> tuple[Tokenizer, dict[str, str]]:
    scores = value("scores", [0.0] * len(texts))
    kinds = value("token_type", [build.NORMAL] * len(texts))
    pieces = [build.Piece(*entry) for entry in zip(texts, scores, kinds, strict=True)]
    prefix = bool(value("add_space_prefix", True))
    core = build.build(
        pieces,
        special=special,
        normalize=build.normalizer(
            dummy_prefix=prefix,
            remove_extra_whitespaces=bool(value("remove_extra_whitespaces", False)),
        ),
        dummy_prefix=prefix,
    )
    return core, _roles(texts, value)


def _build_merged(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...]
) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a vocabulary of byte-level merges."""
    kinds = value("token_type", [build.NORMAL] * len(texts))
    # Rows without a token are filled up with some that no text gives.
    usual = {text: i for i, text in enumerate(texts) if kinds[i] != build.UNUSED}
    core = byte_level.build(
        usual,
        byte_level.pairs(value("merges", [])),
        special=[text for text, i in usual.items() if kinds[i] == build.CONTROL],
        added=[text for text, i in usual.items() if kinds[i] == build.USER_DEFINED],
        pattern=byte_level.PATTERNS[value("pre")],
    )
    roles = _roles(texts, value)
    # The start token of a file that says not to use it stands for nothing.
    if not value("add_bos_token", False):
        roles.pop("start", None)
    return core, roles


def _roles(texts: list[str], value: Callable[..., Any]) -> dict[str, str]:
    """Returns the texts of the start, end and padding token, where the file names them."""
    ids = {"start": "bos_token_id", "end": "eos_token_id", "pad": "padding_token_id"}
    named = {name: value(key) for name, key in ids.items()}
    return {name: texts[i] for name, i in named.items() if i is not None}


class GGUFVocabulary(NamedTuple):
    """A tokenizer as GGUF files hold it.

    Attributes:
        texts: texts of the tokens, in the order of ids.
        scores: scores of each; the higher, the earlier its parts are merged.
        kinds: kinds of each, as in `pieces.Piece`.
        unknown: id of the token for what no other stands for, or None.
        space_prefix: whether a blank is put before a text.
    """

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    unknown: int | None
    space_prefix: bool


def describe(
    core: Tokenizer,
    rows: int,
    file: str = "a GGUF file",
    instead: str = "write hf, or the model without a preprocessor",
) -> GGUFVocabulary:
    """Returns what `load` reads, of a tokenizer that merges pieces as SentencePiece does.

    Args:
        core: with merges, such as Gemma's.
        rows: rows of the embedding table: tokens behind them are left out, and rows without a token
            get one that no text gives.
        file: what it is for, in errors.
        instead: what to do where it cannot be, in errors.

    Raises:
        InputError: for another kind of tokenizer, or one that would give other ids from a file.
    """
    described = json.loads(core.to_str())
    model, steps = described["model"], list(_steps(described["normalizer"]))
    known = {"Replace", "Prepend"}
    if model["type"] != "BPE" or not model["byte_fallback"] or not known.issuperset(steps):
        raise InputError(
            f"{file} holds merges with bytes for what is unknown, over plain text; this tokenizer "
            f"is {model['type']} over {', '.join(steps) or 'plain text'}: {instead}"
        )
    vocabulary = core.get_vocab(with_added_tokens=True)
    texts = [f"[PAD{i}]" for i in range(rows)]
    kinds = [build.UNUSED] * rows
    scores = [float(-len(model["merges"]))] * rows
    # A piece is merged when the first merge that makes it is due.
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        parts = merge if isinstance(merge, list) else merge.split(" ")
        ranks.setdefault("".join(parts), rank)
    added = {token["id"]: token["special"] for token in described["added_tokens"]}
    for text, i in vocabulary.items():
        if i >= rows:
            continue
        texts[i], kinds[i] = text, build.NORMAL
        scores[i] = float(-ranks.get(text, len(ranks)))
        if re.fullmatch("<0x[0-9A-F]{2}>", text):
            kinds[i] = build.BYTE
        elif i in added:
            kinds[i] = build.CONTROL if added[i] else build.USER_DEFINED
        if text == model["unk_token"]:
            kinds[i] = build.UNKNOWN
    found = GGUFVocabulary(
        texts, scores, kinds, vocabulary.get(model["unk_token"]), "Prepend" in steps
    )
    if not _is_equal(core, found):
        raise InputError(
            f"this tokenizer cuts text by more than the scores of its pieces, which is all that "
            f"{file} holds: {instead}"
        )
    return found


def _is_equal(core: Tokenizer, found: GGUFVocabulary) -> bool:
    """Returns whether a file would cut text alike; pieces in any order make text to ask about."""
    settings = {
        "scores": found.scores,
        "token_type": found.kinds,
        "add_space_prefix": found.space_prefix,
    }
    again, _ = _build(found.texts, lambda name, default=None: settings.get(name, default), ())
    usual = [
        text.replace(build.SPACE, " ")
        for text, kind in zip(found.texts, found.kinds, strict=True)
        if kind == build.NORMAL
    ]
    mixed = random.Random(0).sample(usual, len(usual))
    for first in range(0, len(mixed), ASKED):
        text = "".join(mixed[first : first + ASKED])
        ids, wanted = (x.encode(text, add_special_tokens=False).ids for x in (again, core))
        if ids != wanted:
            return False
    return True


def _steps(normalizer: dict[str, Any] | None) -> Iterator[str]:
    """Yields the kinds of a normalizer's steps, one after the other."""
    if normalizer is None:
        return
    if normalizer["type"] == "Sequence":
        for step in normalizer["normalizers"]:
            yield from _steps(step)
    else:
        yield normalizer["type"]
