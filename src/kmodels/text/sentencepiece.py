"""SentencePiece .model files, read and written without the sentencepiece package."""

import base64
import binascii
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kmodels.core import protobuf
from kmodels.core.errors import InputError
from kmodels.core.files import limited
from kmodels.core.protobuf import Field, message_classes
from kmodels.core.remote import local_copy
from kmodels.text import gguf
from kmodels.text.pieces import CONTROL, NORMAL, USER_DEFINED, Piece, build, normalizer

log = logging.getLogger("kmodels")

# Field numbers and defaults of sentencepiece_model.proto. Its enumerations stand as whole numbers,
# which are the same on the wire, and its texts as bytes, which may be told not to be UTF-8.
_TABLE = {
    "Piece": (
        Field("piece", 1, "bytes"),
        Field("score", 2, "float"),
        Field("type", 3, "int32", default="1"),
    ),
    "TrainerSpec": (
        Field("model_type", 3, "int32", default="1"),
        Field("vocab_size", 4, "int32"),
        Field("treat_whitespace_as_suffix", 24, "bool"),
        Field("byte_fallback", 35, "bool"),
        Field("unk_id", 40, "int32"),
        Field("bos_id", 41, "int32"),
        Field("eos_id", 42, "int32"),
        Field("pad_id", 43, "int32"),
        Field("unk_piece", 45, "bytes"),
        Field("bos_piece", 46, "bytes"),
        Field("eos_piece", 47, "bytes"),
        Field("pad_piece", 48, "bytes"),
    ),
    "NormalizerSpec": (
        Field("name", 1, "bytes"),
        Field("precompiled_charsmap", 2, "bytes"),
        Field("add_dummy_prefix", 3, "bool", default="true"),
        Field("remove_extra_whitespaces", 4, "bool", default="true"),
        Field("escape_whitespaces", 5, "bool", default="true"),
    ),
    "ModelProto": (
        Field("pieces", 1, "Piece", repeated=True),
        Field("trainer_spec", 2, "TrainerSpec"),
        Field("normalizer_spec", 3, "NormalizerSpec"),
        Field("denormalizer_spec", 5, "NormalizerSpec"),
    ),
}


@functools.cache
def model_class() -> Any:
    """Returns the class of the message that such a file is."""
    return message_classes("kmodels.sentencepiece", _TABLE, "proto2")["ModelProto"]


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
    """
    try:
        data = limited(local_copy(path)).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse(data, path, special)


def parse(
    data: bytes, origin: object, special: tuple[str, ...] = ()
) -> tuple[Tokenizer, dict[str, str]]:
    """Returns the same from the content of a file; `origin` names it in errors."""
    try:
        model = protobuf.parse(model_class(), data)
        pieces = [Piece(p.piece.decode(), p.score, p.type) for p in model.pieces]
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
    strange = {
        "treat_whitespace_as_suffix=true": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces=false": not rules.escape_whitespaces,
        "a denormalizer_spec": model.denormalizer_spec.precompiled_charsmap,
    }
    if names := [name for name, there in strange.items() if there]:
        raise InputError(
            f"{origin} is a SentencePiece model with {', '.join(names)}, which kmodels does not "
            "follow; give the tokenizer.json of the model"
        )
    if rules.add_dummy_prefix and any(piece.kind == USER_DEFINED for piece in pieces):
        log.warning(
            "%s has user_defined_symbols and add_dummy_prefix: blanks beside these symbols get "
            "other ids than in SentencePiece; give the tokenizer.json of the model",
            origin,
        )
    core = build(
        pieces,
        kind=_KINDS[trainer.model_type],
        byte_fallback=trainer.byte_fallback,
        special=special,
        normalize=normalizer(
            rules.precompiled_charsmap, rules.add_dummy_prefix, rules.remove_extra_whitespaces
        ),
        dummy_prefix=rules.add_dummy_prefix,
    )
    control = {piece.text for piece in pieces if piece.kind == CONTROL}
    named = {
        role: (getattr(trainer, f"{name}_piece") or usual).decode(errors="replace")
        for role, (name, usual) in _ROLES.items()
    }
    return core, {role: text for role, text in named.items() if text in control}


def content_of(proto: str | Path | bytes) -> tuple[bytes, object]:
    """Returns the content of a SentencePiece model, and its name in errors.

    `proto` is the path of a file, its content, or that in base64.
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
        return limited(local_copy(proto)).read_bytes(), proto
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{str(proto)[:200]} cannot be read: {reason}") from error


BPE = 2


def dump(core: Tokenizer, roles: Mapping[str, int | None], marks: Sequence[str] = ()) -> bytes:
    """Returns the content of a .model file that gives the same ids; scores are ranks of merges.

    Args:
        core: merges pieces, with blanks as SPACE and bytes for unknown characters.
        roles: ids of "bos", "eos" and "pad", None for one that is not there.
        marks: control tokens that the file shall find in texts, as kmodels does.

    Raises:
        InputError: for tokens or settings that such a file cannot store.
    """
    instead = "save it as tokenizer.json, or give preprocessor=False"
    rows, file = core.get_vocab_size(), "a SentencePiece file"
    vocabulary = gguf.describe(core, rows, file=file, instead=instead)
    ids = {**roles, "unk": vocabulary.unknown}
    model = model_class()()
    for text, score, kind in zip(
        vocabulary.texts, vocabulary.scores, vocabulary.kinds, strict=True
    ):
        piece = model.pieces.add(piece=text.encode(), score=score)
        if (kind := USER_DEFINED if text in marks else kind) != NORMAL:
            piece.type = kind
    trainer = model.trainer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = BPE, len(vocabulary.texts), True
    for name in ("unk", "bos", "eos", "pad"):
        number = ids[name]
        setattr(trainer, f"{name}_id", -1 if number is None else number)
        if number is not None:
            setattr(trainer, f"{name}_piece", vocabulary.texts[number].encode())
    # Blanks at the ends and runs of them stay as they are; a character map there is none.
    rules = model.normalizer_spec
    rules.name, rules.add_dummy_prefix = b"identity", vocabulary.space_prefix
    rules.remove_extra_whitespaces, rules.escape_whitespaces = False, True
    return model.SerializeToString(deterministic=True)
