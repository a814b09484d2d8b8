"""The vocabulary inside a GGUF file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kmodels.errors import InputError
from kmodels.text import pieces as build
from kmodels.weights.gguf import open_gguf, setting


def load(path: str | Path, special: tuple[str, ...] = ()) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a GGUF file and the names of its start, end and padding tokens.

    Args:
        path: a .gguf file with a SentencePiece vocabulary, as llama.cpp writes for Gemma.
        special: pieces to treat as control tokens though the file says otherwise.

    Returns:
        The tokenizer, and a dictionary with "start", "end" and "pad" where the file names them.

    Raises:
        InputError: for another kind of vocabulary, or where the gguf package is missing.
    """
    reader = open_gguf(path)

    def value(name: str, default: Any = None) -> Any:
        return setting(reader, f"tokenizer.ggml.{name}", default)

    kind, texts = value("model"), value("tokens")
    if kind != "llama" or not texts:
        raise InputError(
            f"{path} holds a vocabulary of kind {kind!r}; 'llama' (SentencePiece) is read, "
            "or give the directory of a tokenizer.json"
        )
    try:
        return _build(texts, value, special)
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
    ids = {"start": "bos_token_id", "end": "eos_token_id", "pad": "padding_token_id"}
    named = {name: value(key) for name, key in ids.items()}
    return core, {name: texts[i] for name, i in named.items() if i is not None}
