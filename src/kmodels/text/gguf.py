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
from kmodels.text.marks import MARKS
from kmodels.weights.gguf import open_gguf, setting

# Pieces of a text that two tokenizers are compared on.
ASKED = 1000
# What llama.cpp calls the vocabulary of Gemma 4: merges over plain text, with bytes for the rest.
MERGED = "gemma4"


def load(
    path: str | Path, special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str], dict[str, Any]]:
    """Returns the tokenizer of a GGUF file, the names of its special tokens, and its chat template.

    Args:
        path: a .gguf file with a SentencePiece vocabulary, as llama.cpp writes for Gemma up to 3,
            with merges as for Gemma 4, or with byte-level merges as for Qwen.
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
    if not (kind in ("llama", MERGED) or merged) or not texts:
        if kind == "gpt2":
            kind = f"gpt2 with pre={cut}"
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; 'llama' (SentencePiece) and {MERGED!r} "
            f"are read, and 'gpt2' with pre={' or '.join(byte_level.PATTERNS)}; or give the "
            "directory of a tokenizer.json"
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
    pairs = None
    if value("model") == MERGED:
        pairs = byte_level.pairs(value("merges", []))
        # Marks that a file has as text, so that they are seen, are control tokens elsewhere.
        special = (*special, *MARKS)
    prefix = bool(value("add_space_prefix", True))
    core = build.build(
        pieces,
        special=special,
        normalize=build.normalizer(
            dummy_prefix=prefix,
            remove_extra_whitespaces=bool(value("remove_extra_whitespaces", False)),
        ),
        dummy_prefix=prefix,
        pairs=pairs,
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
        merges: pairs of pieces with a blank between them, the first to be merged first.
    """

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    unknown: int | None
    space_prefix: bool
    merges: list[str]


def describe(
    core: Tokenizer,
    rows: int,
    file: str = "a GGUF file",
    instead: str = "write hf, or the model without a preprocessor",
    merged: bool = False,
) -> GGUFVocabulary:
    """Returns what `load` reads, of a tokenizer that merges pieces as SentencePiece does.

    Args:
        core: with merges, such as Gemma's.
        rows: rows of the embedding table: tokens behind them are left out, and rows without a token
            get one that no text gives.
        file: what it is for, in errors.
        instead: what to do where it cannot be, in errors.
        merged: whether the file holds the merges too, as those of Gemma 4, or scores alone.

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
    pairs = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, parts in enumerate(pairs):
        ranks.setdefault("".join(parts), rank)
    if merged:
        _check_merges(pairs, file, instead)
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
            if merged and text in MARKS:
                kinds[i] = build.USER_DEFINED
        if text == model["unk_token"]:
            kinds[i] = build.UNKNOWN
    unknown, prefix = vocabulary.get(model["unk_token"]), "Prepend" in steps
    # A merge into a token that was left out with its row is never due.
    held = [" ".join(parts) for parts in pairs if vocabulary["".join(parts)] < rows]
    found = GGUFVocabulary(texts, scores, kinds, unknown, prefix, held)
    if not _is_equal(core, found, merged):
        raise InputError(
            f"this tokenizer cuts text by more than the {'merges' if merged else 'scores'} of its "
            f"pieces, which is all that {file} holds: {instead}"
        )
    return found


def _check_merges(pairs: list[list[str]], file: str, instead: str) -> None:
    """Raises `InputError` for merges that llama.cpp would not do: it cuts text at line ends first.

    A blank would be taken for the one between the two pieces.
    """
    for parts in pairs:
        text = "".join(parts)
        if " " in text or ("\n" in text and text.strip("\n")):
            raise InputError(
                f"{file} holds merges within lines and of line ends, without blanks; this "
                f"tokenizer merges {parts[0]!r} and {parts[1]!r}: {instead}"
            )


def _is_equal(core: Tokenizer, found: GGUFVocabulary, merged: bool) -> bool:
    """Returns whether a file would cut text alike; pieces in any order make text to ask about."""
    settings: dict[str, Any] = {
        **({"model": MERGED, "merges": found.merges} if merged else {}),
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
