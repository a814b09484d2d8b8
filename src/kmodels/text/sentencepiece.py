"""SentencePiece .model files, read without the sentencepiece package."""

import base64
import binascii
from pathlib import Path

from tokenizers import Tokenizer

from kmodels.core.errors import InputError
from kmodels.core.remote import local_copy
from kmodels.data.formats import protobuf
from kmodels.text import pieces as build
from kmodels.text.sentencepiece_proto import model_class

# keras-hub takes a text that is longer, and in base64, for the content of a file.
LONGEST_PATH = 2048
_KINDS = {1: "unigram", 2: "bpe", 3: "word"}
# Fields of the trainer spec, and their defaults in sentencepiece_model.proto. As in the package, a
# role exists if the vocabulary has its piece as a control token.
_ROLES = {"start": ("bos", b"<s>"), "end": ("eos", b"</s>"), "pad": ("pad", b"<pad>")}


def load(path: str | Path, special: tuple[str, ...] = ()) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a SentencePiece model, with its ids, and its special tokens.

    Args:
        path: a .model file of kind BPE (as Gemma's), unigram or word.
        special: pieces to treat as control tokens though the file says otherwise.

    Returns:
        The tokenizer, with the file's normalization, merges, and bytes for unknown characters; and
        the texts of the "start", "end" and "pad" tokens that the file defines.

    Raises:
        InputError: for a file that is not such a model, or of kind character.
    """
    try:
        return parse(local_copy(path).read_bytes(), path, special)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def parse(
    data: bytes, origin: object, special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the same from the content of a file; `origin` names it in errors."""
    try:
        model = protobuf.parse(model_class(), data)
        pieces = [build.Piece(p.piece.decode(), p.score, p.type) for p in model.pieces]
    except ValueError as error:
        raise InputError(f"{origin} is not a SentencePiece model: {error}") from error
    if not pieces:
        raise InputError(f"{origin} is not a SentencePiece model: it has no pieces")
    trainer, rules = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in _KINDS:
        raise InputError(
            f"{origin} is a SentencePiece model of kind {trainer.model_type}; unigram, BPE and "
            "word are read"
        )
    core = build.build(
        pieces,
        kind=_KINDS[trainer.model_type],
        byte_fallback=trainer.byte_fallback,
        special=special,
        normalize=build.normalizer(
            rules.precompiled_charsmap, rules.add_dummy_prefix, rules.remove_extra_whitespaces
        ),
        dummy_prefix=rules.add_dummy_prefix,
    )
    control = {piece.text for piece in pieces if piece.kind == build.CONTROL}
    named = {
        role: (getattr(trainer, f"{name}_piece") or usual).decode(errors="replace")
        for role, (name, usual) in _ROLES.items()
    }
    return core, {role: text for role, text in named.items() if text in control}


def content_of(proto: str | Path | bytes) -> tuple[bytes, object]:
    """Returns the content of a SentencePiece model, and its name in errors.

    Args:
        proto: the path of a file, its content, or that in base64.

    Raises:
        InputError: for a file that cannot be read.
    """
    if isinstance(proto, bytes):
        return proto, "proto"
    if not isinstance(proto, str | Path):
        raise InputError(
            f"proto is a {type(proto).__name__}; give the path of a SentencePiece model, or its "
            "content as bytes"
        )
    if isinstance(proto, str) and len(proto) > LONGEST_PATH:
        try:
            return base64.b64decode(proto, validate=True), "proto"
        except binascii.Error:
            pass
    try:
        return local_copy(proto).read_bytes(), proto
    except OSError as error:
        raise InputError(f"{str(proto)[:200]} cannot be read: {error.strerror}") from error
