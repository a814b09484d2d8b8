"""The vocabulary inside a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kmodels.core.errors import InputError
from kmodels.text import byte_level
from kmodels.text import pieces as build
from kmodels.text.marks import MARKS
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

    Args:
        path: a .gguf file with a SentencePiece vocabulary, as llama.cpp writes for Gemma up to 3,
            with merges as for Gemma 4, or with byte-level merges as for Qwen.
        special: pieces to treat as control tokens though the file says otherwise.

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
    is_bytes = kind == BYTES and cut in byte_level.PATTERNS
    if not (kind in (SCORED, MERGED) or is_bytes) or not texts:
        if kind == BYTES:
            kind = f"{BYTES} with pre={cut}"
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; {SCORED!r} (SentencePiece) and "
            f"{MERGED!r} are read, and {BYTES!r} with pre={' or '.join(byte_level.PATTERNS)}; or "
            "give the directory of a tokenizer.json"
        )
    try:
        make = build_bytes if is_bytes else build_pieces
        core = make(texts, value, special)
        roles, stop = _roles(texts, value, kind)
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(
            f"{path} holds a damaged vocabulary: {' '.join(str(error).split())}; copy it again"
        ) from None
    settings: dict[str, Any] = {ROLES[role]: text for role, text in roles.items()}
    if value("add_eos_token", False):
        settings["add_eos_token"] = True
    templates = {name: f"tokenizer.chat_template.{name}" for name in named(TEMPLATES) or ()}
    templates = {DEFAULT: "tokenizer.chat_template", **templates}
    found = {name: named(key) for name, key in templates.items()}
    if found := {name: text for name, text in found.items() if text is not None}:
        settings["chat_template"] = found[DEFAULT] if list(found) == [DEFAULT] else found
    named.warn_of_others(("tokenizer.",), IDLE, IDLE_AT)
    return core, {"settings": settings, "stop": stop}


def build_pieces(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary of pieces.

    Args:
        texts: texts of the tokens, in the order of ids.
        value: reads another setting of the vocabulary by its name, with a default.
        special: see `load`.
    """
    scores = value("scores", [0.0] * len(texts))
    kinds = value("token_type", [build.NORMAL] * len(texts))
    pieces = [build.Piece(*entry) for entry in zip(texts, scores, kinds, strict=True)]
    pairs = None
    if value("model") == MERGED:
        pairs = byte_level.pairs(value("merges", []))
        # Marks that a file has as text, so that they are seen, are control tokens elsewhere.
        special = (*special, *MARKS)
    prefix = bool(value("add_space_prefix", True))
    return build.build(
        pieces,
        special=special,
        normalize=build.normalizer(
            dummy_prefix=prefix,
            remove_extra_whitespaces=bool(value("remove_extra_whitespaces", False)),
        ),
        dummy_prefix=prefix,
        pairs=pairs,
    )


def build_bytes(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> Tokenizer:
    """Returns what `build_pieces` does, of a vocabulary of byte-level merges.

    Args:
        texts: as there.
        value: as there.
        special: unused; such files say of each token whether it is one.
    """
    kinds = value("token_type", [build.NORMAL] * len(texts))
    # Rows without a token are filled up with some that no text gives.
    usual = {text: i for i, text in enumerate(texts) if kinds[i] != build.UNUSED}
    return byte_level.build(
        usual,
        byte_level.pairs(value("merges", [])),
        special=[text for text, i in usual.items() if kinds[i] == build.CONTROL],
        added=[text for text, i in usual.items() if kinds[i] == build.USER_DEFINED],
        pattern=byte_level.PATTERNS[value("pre")],
    )


def _roles(
    texts: list[str], value: Callable[..., Any], kind: str
) -> tuple[dict[str, str | None], list[int]]:
    """Returns the texts of the start, end and padding token, and ids that end a text.

    As in llama.cpp, a SentencePiece vocabulary has tokens 1 and 2 by default, and all but
    byte-level ones add their start token by default.
    """
    start, end = (1, 2) if kind == SCORED else (None, None)
    ids = {
        "start": value("bos_token_id", start) if value("add_bos_token", kind != BYTES) else None,
        "end": value("eos_token_id", end),
        "pad": value("padding_token_id"),
    }
    roles = {role: None if i is None else texts[i] for role, i in ids.items()}
    ends = (value("eot_token_id"), value("eom_token_id"))
    return roles, [i for i in ends if i is not None]
