"""Tokenizers as GGUF files hold them, read and written."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders

from kmodels.core.errors import InputError, one_line
from kmodels.text import byte_level, pieces
from kmodels.text.pieces import MARKS
from kmodels.text.settings import DEFAULT, ROLES
from kmodels.weights.gguf import Settings, open_gguf

# What llama.cpp calls its kinds of vocabularies: pieces with scores, the merges of Gemma 4 over
# plain text with bytes for the rest, and merges of bytes.
SCORED, MERGED, BYTES = "llama", "gemma4", "gpt2"
TEMPLATES = "tokenizer.chat_templates"
# Settings that one of these kinds reads and another does not, those of other kinds, tokens without
# a role in a decoder, and the same vocabulary in other forms.
IDLE = {
    *("tokenizer.huggingface.json", "tokenizer.rwkv.world"),
    *(
        f"tokenizer.ggml.{name}"
        for name in (
            *("scores", "merges", "pre", "add_space_prefix", "remove_extra_whitespaces"),
            *("token_type", "token_type_count", "precompiled_charsmap", "unknown_token_id"),
            *("seperator_token_id", "mask_token_id", "cls_token_id", "bos_token_id"),
            *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id"),
            *("fim_rep_token_id", "fim_sep_token_id", "prefix_token_id", "suffix_token_id"),
            "middle_token_id",
        )
    ),
}
IDLE_AT: dict[str, tuple[object, ...]] = {"tokenizer.ggml.add_sep_token": (False,)}


def load(path: str | Path, special: tuple[str, ...] = ()) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer of a GGUF file and the other arguments of `kmodels.text.Tokenizer`.

    The file has a SentencePiece vocabulary, as llama.cpp writes for Gemma up to 3, merges as for
    Gemma 4, or byte-level merges as for Qwen and Llama 3. Pieces of `special` are control tokens
    though the file says otherwise.

    Returns:
        The tokenizer, and a dictionary with "settings" (null for a token that the file lacks, and
        the chat templates if there are some) and "stop".

    Raises:
        InputError: for another kind of vocabulary, or if the gguf package is missing.
    """
    named = Settings(path, open_gguf(path))

    def value(name: str, default: object = None) -> Any:
        return named(f"tokenizer.ggml.{name}", default)

    kind, texts, cut = value("model"), value("tokens"), value("pre")
    is_bytes = kind == BYTES and cut in byte_level.KINDS
    if not (kind in (SCORED, MERGED) or is_bytes) or not texts:
        if kind == BYTES:
            kind = f"{BYTES} with pre={cut}"
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; {SCORED!r} (SentencePiece) and "
            f"{MERGED!r} are read, and {BYTES!r} with pre={' or '.join(byte_level.KINDS)}; or "
            "give the directory of a tokenizer.json"
        )
    try:
        make = build_bytes if is_bytes else build_pieces
        core = make(texts, value, special)
        adds_start = not is_bytes or byte_level.KINDS[cut].adds_start
        roles, stop = _roles(texts, value, kind, adds_start)
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(
            f"{path} holds a damaged vocabulary: {one_line(error)}; copy it again"
        ) from None
    settings: dict[str, Any] = {ROLES[role]: text for role, text in roles.items()}
    if value("add_eos_token", False):
        settings["add_eos_token"] = True
    templates = {name: f"tokenizer.chat_template.{name}" for name in named(TEMPLATES) or ()}
    templates = {DEFAULT: "tokenizer.chat_template", **templates}
    values = {name: named(key) for name, key in templates.items()}
    if chats := {name: text for name, text in values.items() if text is not None}:
        settings["chat_template"] = chats[DEFAULT] if list(chats) == [DEFAULT] else chats
    named.warn_of_others(("tokenizer.",), IDLE, IDLE_AT)
    return core, {"settings": settings, "stop": stop}


def build_pieces(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary of pieces, in the order of ids.

    `value` reads another setting of the vocabulary by its name, with a default.
    """
    scores = value("scores", [0.0] * len(texts))
    kinds = value("token_type", [pieces.NORMAL] * len(texts))
    vocabulary = [pieces.Piece(*entry) for entry in zip(texts, scores, kinds, strict=True)]
    pairs = None
    if value("model") == MERGED:
        pairs = byte_level.pairs(value("merges", []))
        # Marks that a file has as text, so that they are seen, are control tokens elsewhere.
        special = (*special, *MARKS)
    prefix = bool(value("add_space_prefix", True))
    return pieces.build(
        vocabulary,
        special=special,
        normalize=pieces.normalizer(
            dummy_prefix=prefix,
            remove_extra_whitespaces=bool(value("remove_extra_whitespaces", False)),
        ),
        dummy_prefix=prefix,
        pairs=pairs,
    )


def build_bytes(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> Tokenizer:
    """Same as `build_pieces`, for byte-level merges; such files list the kind of each token."""
    kinds = value("token_type", [pieces.NORMAL] * len(texts))
    # Rows without a token are filled up with some that no text gives.
    usual = {text: i for i, text in enumerate(texts) if kinds[i] != pieces.UNUSED}
    return byte_level.build(
        usual,
        byte_level.pairs(value("merges", [])),
        special=[text for text, i in usual.items() if kinds[i] == pieces.CONTROL],
        added=[text for text, i in usual.items() if kinds[i] == pieces.USER_DEFINED],
        kind=value("pre"),
    )


def _roles(
    texts: list[str], value: Callable[..., Any], kind: str, adds_start: bool
) -> tuple[dict[str, str | None], list[int]]:
    """Returns the texts of the start, end and padding token, and ids that end a text.

    As in llama.cpp, a SentencePiece vocabulary has tokens 1 and 2 by default. `adds_start` is the
    default of add_bos_token.
    """
    start, end = (1, 2) if kind == SCORED else (None, None)
    ids = {
        "start": value("bos_token_id", start) if value("add_bos_token", adds_start) else None,
        "end": value("eos_token_id", end),
        "pad": value("padding_token_id"),
    }
    roles = {role: None if i is None else texts[i] for role, i in ids.items()}
    ends = (value("eot_token_id"), value("eom_token_id"))
    return roles, [i for i in ends if i is not None]


# Pieces of a text that two tokenizers are compared on.
ASKED = 1000
INSTEAD = "write hf, or the model without a preprocessor"


class GGUFVocabulary(NamedTuple):
    """A tokenizer as GGUF files hold it.

    Attributes:
        model: kind of the vocabulary: `SCORED`, `MERGED` or `BYTES`.
        pre: name of the pre-tokenizer, or None if the kind implies it.
        texts: texts of the tokens, in the order of ids.
        scores: scores of each; the higher, the earlier its parts are merged. Empty for `BYTES`.
        kinds: kinds of each, as in `pieces.Piece`.
        merges: pairs of tokens with a blank between them, the first to be merged first. Empty for
            `SCORED`.
        unknown: id of the unknown token, or None.
        space_prefix: whether a blank is put before a text; None for `BYTES`.
    """

    model: str
    pre: str | None
    texts: list[str]
    scores: list[float]
    kinds: list[int]
    merges: list[str]
    unknown: int | None
    space_prefix: bool | None


def describe(
    core: Tokenizer,
    rows: int,
    kind: str = SCORED,
    file: str = "a GGUF file",
    instead: str = INSTEAD,
) -> GGUFVocabulary:
    """Returns the vocabulary of a tokenizer, in the form that `gguf.load` reads.

    Args:
        core: with merges, of pieces as SentencePiece makes them or of bytes.
        rows: rows of the embedding table: tokens behind them are left out, and rows without a token
            get one that no text gives.
        kind: how the file stores it: `SCORED` for scores only, `MERGED` for scores and merges,
            `BYTES` for byte-level merges.
        file: kind of file, for errors.
        instead: advice for errors.

    Raises:
        InputError: for another kind of tokenizer, or one that would give other ids from a file.
    """
    make = _of_bytes if kind == BYTES else _of_pieces
    vocabulary, asked = make(core, rows, kind, file, instead)
    if not _is_equal(core, vocabulary, asked):
        raise InputError(
            f"this tokenizer cuts text by more than the {'scores' if kind == SCORED else 'merges'} "
            f"of its pieces, which is all that {file} holds: {instead}"
        )
    return vocabulary


def _of_pieces(
    core: Tokenizer, rows: int, kind: str, file: str, instead: str
) -> tuple[GGUFVocabulary, list[str]]:
    """Returns the vocabulary of a tokenizer of pieces, and the text of its usual tokens."""
    described = json.loads(core.to_str())
    model, steps = described["model"], list(_steps(described["normalizer"]))
    known = {"Replace", "Prepend"}
    if model["type"] != "BPE" or not model["byte_fallback"] or not known.issuperset(steps):
        raise InputError(
            f"{file} holds merges with bytes for what is unknown, over plain text; this tokenizer "
            f"is {model['type']} over {', '.join(steps) or 'plain text'}: {instead}"
        )
    merged = kind == MERGED
    pairs = _pairs(model["merges"])
    if merged:
        _check_merges(pairs, file, instead)
    # A piece is merged when the first merge that makes it is due.
    ranks: dict[str, int] = {}
    for rank, parts in enumerate(pairs):
        ranks.setdefault("".join(parts), rank)
    texts, kinds = _tokens(core, rows)
    scores = [float(-ranks.get(text, len(ranks))) for text in texts]
    for i, text in enumerate(texts):
        if kinds[i] == pieces.UNUSED:
            scores[i] = float(-len(pairs))
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            kinds[i] = pieces.BYTE
        elif merged and text in MARKS and kinds[i] == pieces.CONTROL:
            kinds[i] = pieces.USER_DEFINED
        if text == model["unk_token"]:
            kinds[i] = pieces.UNKNOWN
    unknown = None if model["unk_token"] is None else core.token_to_id(model["unk_token"])
    merges = _merges_of_file(core, pairs, rows) if merged else []
    pre = None if merged else "default"
    vocabulary = GGUFVocabulary(
        kind, pre, texts, scores, kinds, merges, unknown, "Prepend" in steps
    )
    usual = zip(texts, kinds, strict=True)
    return vocabulary, [text.replace(pieces.SPACE, " ") for text, k in usual if k == pieces.NORMAL]


def _of_bytes(
    core: Tokenizer, rows: int, kind: str, file: str, instead: str
) -> tuple[GGUFVocabulary, list[str]]:
    """Same as `_of_pieces`, for a tokenizer that merges bytes."""
    described = json.loads(core.to_str())
    way = _way(described)
    known = {
        name: _way(json.loads(byte_level.build({}, [], kind=name).to_str()))
        for name in byte_level.KINDS
    }
    if (pre := next((name for name in known if known[name] == way), None)) is None:
        raise InputError(
            f"{file} holds merges of bytes in text that is cut as by {' or '.join(known)}; this "
            f"tokenizer is {described['model']['type']} and cuts it in another way: {instead}"
        )
    texts, kinds = _tokens(core, rows)
    merges = _merges_of_file(core, _pairs(described["model"]["merges"]), rows)
    vocabulary = GGUFVocabulary(kind, pre, texts, [], kinds, merges, None, None)
    decoder, usual = decoders.ByteLevel(), zip(texts, kinds, strict=True)
    return vocabulary, [decoder.decode([text]) for text, k in usual if k == pieces.NORMAL]


def _way(described: dict[str, Any]) -> tuple[Any, ...]:
    """Returns how a tokenizer makes ids of text, except for its vocabulary."""
    vocabulary = ("vocab", "merges", "unk_token", "fuse_unk")
    model = {k: v or None for k, v in described["model"].items() if k not in vocabulary}
    before = described["pre_tokenizer"] or {}
    # That one is about the places of tokens in a text, not about ids.
    steps = [
        {name: value for name, value in step.items() if name != "trim_offsets"}
        for step in before.get("pretokenizers", [before])
    ]
    return model, described["normalizer"], steps


def _pairs(merges: list[Any]) -> list[list[str]]:
    """Returns merges as pairs; files of tokenizers have them as texts too."""
    return [parts if isinstance(parts, list) else parts.split(" ") for parts in merges]


def _tokens(core: Tokenizer, rows: int) -> tuple[list[str], list[int]]:
    """Returns text and kind of each row, as far as the vocabulary itself says it."""
    added = core.get_added_tokens_decoder()
    texts, kinds = [f"[PAD{i}]" for i in range(rows)], [pieces.UNUSED] * rows
    for text, i in core.get_vocab(with_added_tokens=True).items():
        if i < rows:
            texts[i], kinds[i] = text, pieces.NORMAL
            if i in added:
                kinds[i] = pieces.CONTROL if added[i].special else pieces.USER_DEFINED
    return texts, kinds


def _merges_of_file(core: Tokenizer, pairs: list[list[str]], rows: int) -> list[str]:
    """Returns the merges of a file, without those of or into tokens that were left out."""
    ids = core.get_vocab(with_added_tokens=True)
    return [" ".join(pair) for pair in pairs if all(ids[x] < rows for x in (*pair, "".join(pair)))]


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


def _is_equal(core: Tokenizer, vocabulary: GGUFVocabulary, asked: Sequence[str]) -> bool:
    """Returns True if a file would cut text alike; pieces in any order make text to ask about."""
    settings: dict[str, Any] = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "merges": vocabulary.merges,
        "scores": vocabulary.scores,
        "token_type": vocabulary.kinds,
        "add_space_prefix": vocabulary.space_prefix,
    }
    make = build_bytes if vocabulary.model == BYTES else build_pieces
    again = make(vocabulary.texts, lambda name, default=None: settings.get(name, default))
    mixed = random.Random(0).sample(asked, len(asked))
    for first in range(0, len(mixed), ASKED):
        text = "".join(mixed[first : first + ASKED])
        ids, wanted = (x.encode(text, add_special_tokens=False).ids for x in (again, core))
        if ids != wanted:
            return False
    return True


def _steps(normalizer: dict[str, Any] | None) -> Iterator[str]:
    """Yields the kinds of a normalizer's steps, and the patterns that one replaces."""
    if normalizer is None:
        return
    if normalizer["type"] == "Sequence":
        for step in normalizer["normalizers"]:
            yield from _steps(step)
    else:
        pattern = normalizer.get("pattern", {}).get("Regex")
        yield normalizer["type"] if pattern is None else f"{normalizer['type']} of {pattern!r}"
