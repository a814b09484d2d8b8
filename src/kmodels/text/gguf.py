"""The vocabulary inside a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kmodels.core.errors import InputError
from kmodels.text import byte_level
from kmodels.text import pieces as build
from kmodels.text.marks import MARKS
from kmodels.weights.gguf import open_gguf, setting

# What llama.cpp calls its kinds of vocabularies: pieces with scores, the merges of Gemma 4 over
# plain text with bytes for the rest, and merges of bytes.
SCORED, MERGED, BYTES = "llama", "gemma4", "gpt2"


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
    is_bytes = kind == BYTES and cut in byte_level.PATTERNS
    if not (kind in (SCORED, MERGED) or is_bytes) or not texts:
        if kind == BYTES:
            kind = f"{BYTES} with pre={cut}"
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; {SCORED!r} (SentencePiece) and "
            f"{MERGED!r} are read, and {BYTES!r} with pre={' or '.join(byte_level.PATTERNS)}; or "
            "give the directory of a tokenizer.json"
        )
    template = setting(reader, "tokenizer.chat_template", None)
    settings = {} if template is None else {"chat_template": template}
    try:
        make = build_bytes if is_bytes else build_pieces
        return *make(texts, value, special), settings
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(
            f"{path} holds a damaged vocabulary: {' '.join(str(error).split())}; copy it again"
        ) from None


def build_pieces(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a vocabulary of pieces, and the names of its special tokens.

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


def build_bytes(
    texts: list[str], value: Callable[..., Any], special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str]]:
    """Returns what `build_pieces` does, of a vocabulary of byte-level merges.

    Args:
        texts: as there.
        value: as there.
        special: unused; such files say of each token whether it is one.
    """
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
