"""SentencePiece .model files, read without the sentencepiece and protobuf packages."""

import struct
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.text import pieces as build

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 2, 3, 4
_UNIGRAM = 1
_KINDS = {_UNIGRAM: "unigram", 2: "bpe", 3: "word"}

Value = int | float | bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a protobuf message; messages and strings as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 1:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
            value = data[at : at + size]
            if len(value) < size:
                raise IndexError("the file ends inside a field")
            at += size
        elif kind == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        else:
            raise ValueError(f"wire type {kind}")
        yield key >> 3, value


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message belongs")
    return value


def _piece(data: bytes) -> build.Piece:
    fields = dict(_fields(data))
    return build.Piece(
        _bytes(fields.get(_PIECE_TEXT, b"")).decode(),
        float(fields.get(_PIECE_SCORE, 0.0)),
        int(fields.get(_PIECE_KIND, build.NORMAL)),
    )


def load(path: str | Path, special: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer of a SentencePiece model, with its ids.

    Args:
        path: a .model file of kind BPE (as Gemma's), unigram or word.
        special: pieces to treat as control tokens though the file says otherwise.

    Returns:
        It does what the file says: normalisation, merges, bytes for unknown characters.

    Raises:
        InputError: for a file that is not such a model, or of kind character.
    """
    try:
        return parse(local_path(path).read_bytes(), path, special)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def parse(data: bytes, origin: object, special: tuple[str, ...] = ()) -> Tokenizer:
    """The same from the content of a file; `origin` names it in errors."""
    try:
        fields = list(_fields(data))
        pieces = [_piece(_bytes(value)) for number, value in fields if number == _PIECES]
        trainer = {k: v for n, part in fields if n == _TRAINER for k, v in _fields(_bytes(part))}
        rules = {k: v for n, part in fields if n == _NORMALIZER for k, v in _fields(_bytes(part))}
    except (IndexError, ValueError, struct.error) as error:
        raise InputError(f"{origin} is not a SentencePiece model: {error}") from error
    if not pieces:
        raise InputError(f"{origin} is not a SentencePiece model: it has no pieces")
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in _KINDS:
        raise InputError(
            f"{origin} is a SentencePiece model of kind {kind}; unigram, BPE and word are read"
        )
    prefix = bool(rules.get(_DUMMY_PREFIX, True))
    return build.build(
        pieces,
        kind=_KINDS[int(kind)],
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, False)),
        special=special,
        normalize=build.normalizer(
            _bytes(rules.get(_CHARSMAP, b"")),
            prefix,
            bool(rules.get(_REMOVE_EXTRA_WHITESPACES, True)),
        ),
        dummy_prefix=prefix,
    )
